"""C++ kernels for the CPU: `library` compiles and loads them, `attention` is the paged-attention backend."""
