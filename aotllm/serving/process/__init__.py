"""A server of several processes: one that runs the engines, front ends that speak to clients, a supervisor.

    supervisor ──┬─► engine process   GptManagers; no tokenizing, no JSON
                 └─► front ends       HTTP, gRPC, templates, tokenizing, detokenizing, metrics

Front ends and the engine process speak over a Unix socket: tokens in, tokens out (`messages`). A front end that dies
takes its own connections with it; when the engine process dies, front ends say so.
"""
