"""Exchange between GPUs of one host: peer buffers and the kernels that publish into them."""
