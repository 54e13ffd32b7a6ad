"""The parts of a planned reduction at run time: reducers, operators, memory, CUDA graphs, NCCL."""
