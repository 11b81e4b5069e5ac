"""The tensors of TensorRT-LLM's classic Triton models, and what they ask of an engine.

Both servers that such clients talk to use it: our own (`aotllm.serving.kserve`), and NVIDIA's with our model in it
(`aotllm.export_triton`). So nothing here knows of HTTP, gRPC or Triton.
"""
