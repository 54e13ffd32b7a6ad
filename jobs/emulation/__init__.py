"""What `jobs/emulated_cluster` is made of. Plain standard library: it runs on the system's Python."""
