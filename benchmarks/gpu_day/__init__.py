"""What `benchmarks/gpu_day.sh` needs besides the tools that it calls: readers of output, small programs."""
