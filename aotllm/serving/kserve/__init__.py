"""KServe v2 with Triton's extensions, over gRPC and HTTP."""
