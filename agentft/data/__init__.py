"""Data (floor 3): sessions in, shards out, batches back."""
