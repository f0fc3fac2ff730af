"""What the benchmarks share: samples and gates, the host floor, the peers."""
