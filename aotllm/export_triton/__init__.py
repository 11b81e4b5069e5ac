"""Running an engine inside NVIDIA's Triton Inference Server, on its Python backend.

`repository_writer` writes the model repository. What its `model.py` files import, and what runs inside Triton, is
`engine_model` and `forwarding_model`, which can be imported there only.
"""
