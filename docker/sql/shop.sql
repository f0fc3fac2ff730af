-- A shop: enough to ask joins, sums and dates of.
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT NOT NULL);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT NOT NULL, price_cents INTEGER NOT NULL);
CREATE TABLE orders (
    id INTEGER PRIMARY KEY,
    customer_id INTEGER NOT NULL REFERENCES customers (id),
    product_id INTEGER NOT NULL REFERENCES products (id),
    pieces INTEGER NOT NULL,
    day TEXT NOT NULL
);
INSERT INTO customers VALUES (1, 'Ada', 'London'), (2, 'Grace', 'New York'), (3, 'Linus', 'Helsinki');
INSERT INTO products VALUES (1, 'keyboard', 8900), (2, 'cable', 700), (3, 'screen', 24900);
WITH RECURSIVE counted (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM counted WHERE n < 120)
INSERT INTO orders
SELECT n, 1 + n % 3, 1 + (n / 3) % 3, 1 + n % 4, date('2024-01-01', '+' || (n * 3) || ' days') FROM counted;
