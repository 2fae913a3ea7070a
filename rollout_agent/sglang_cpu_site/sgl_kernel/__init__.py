"""Stands in for SGLang's CPU kernel build, which no registry carries.

With SGLANG_USE_CPU_ENGINE=1 SGLang imports some `*_cpu` names at module level; on the plain
(non-speculative) path it calls only the bookkeeping of KV slots below. No operator is registered,
so every layer runs SGLang's own torch code. Any other `*_cpu` function raises when it is called:
nothing is faked. Never put this folder on a GPU engine's path: it would hide the real kernels.
"""


def assign_req_to_token_pool_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    taken = 0
    for request, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[request, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def __getattr__(name):
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} needs SGLang's real CPU kernel build")

    return missing
