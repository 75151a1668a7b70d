"""TARGET_VERIFY by torch's own scaled_dot_product_attention, with the allow-mask of a tree."""


def make_native_backend(runner):
    """An attention backend for `runner` (sglang's ModelRunner) that computes TARGET_VERIFY with torch's SDPA."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.mem_cache import memory_pool

    # From 0.5.14 on a batch no longer holds the pools, and a pool is told where to write by an object of its own.
    write_location = getattr(memory_pool, "KVWriteLoc", lambda slots, _sliding_window: slots)

    class CpuVerifyAttnBackend(TorchNativeAttnBackend):
        def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
            pool = runner.token_to_kv_pool
            if not forward_batch.forward_mode.is_target_verify():
                if layer.qk_head_dim == pool.get_key_buffer(layer.layer_id).shape[-1]:
                    return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
                # MLA: a prompt without a cached prefix is attended to before its keys are compressed for the cache
                out = prompt_attention(
                    q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
                    k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
                    v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
                    lengths=forward_batch.extend_seq_lens_cpu,
                    scale=layer.scaling,
                )
                return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)
            if save_kv_cache:
                pool.set_kv_buffer(layer, write_location(forward_batch.out_cache_loc, None), k, v)
            out = verify_attention(
                q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
                pool.get_key_buffer(layer.layer_id),
                pool.get_value_buffer(layer.layer_id),
                slots=runner.req_to_token_pool.req_to_token[forward_batch.req_pool_indices],
                prefix_lens=forward_batch.seq_lens.tolist(),
                width=forward_batch.spec_info.draft_token_num,
                allow=forward_batch.spec_info.custom_mask,
                causal=layer.attn_type != AttentionType.ENCODER_ONLY,
                scale=layer.scaling,
            )
            return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    return CpuVerifyAttnBackend(runner)


def prompt_attention(query, keys, values, *, lengths, scale):
    """Causal attention within each of some whole prompts.

    Args:
        query, keys: [sum of lengths, heads, head size]. values: [sum of lengths, heads, value size].
        lengths: tokens of each prompt.
        scale: factor on the scores.

    Returns: [sum of lengths, heads, value size].
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    prompts = zip(*(tensor.split(list(lengths)) for tensor in (query, keys, values)), strict=True)
    out = []
    for parts in prompts:
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        out.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0].transpose(0, 1))
    return torch.cat(out)


def verify_attention(query, keys, values, *, slots, prefix_lens, width, allow, causal, scale):
    """Attention of `width` new tokens a request over its prefix and over each other.

    Args:
        query: [requests * width, heads, head size].
        keys, values: the layer's cache, [cache slots, kv heads, head size]; the new tokens are already in it.
        slots: [requests, any length >= prefix + width] cache slot of each token of a request, in order.
        prefix_lens: tokens before the new ones, a number a request.
        width: new tokens a request (N).
        allow: flat bool mask, for each request its [N, prefix + N] rows one after the other, True = may attend; what is
            left behind them is not read (where the host knows a bound of the lengths only, the mask is longer).
            None: causal, or everything when `causal` is False (the draft's block sees itself both ways).
        causal: see `allow`; has no say when there is a mask.
        scale: factor on the scores.

    Returns: [requests * width, heads, value size].
    Raises: ValueError if the mask's type or size is wrong, or a row may attend to nothing.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    expected = sum(width * (prefix + width) for prefix in prefix_lens)
    if allow is not None and (allow.dtype != torch.bool or allow.numel() < expected):
        raise ValueError(f"verify mask: {expected} bools expected, got {allow.numel()} of {allow.dtype}")
    out, mask_start = [], 0
    for request, prefix in enumerate(prefix_lens):
        total = prefix + width
        if allow is not None:
            mask = allow[mask_start : mask_start + width * total].view(width, total)
            mask_start += width * total
            if not bool(mask.any(dim=1).all()):
                raise ValueError(f"verify mask: a row of request {request} of the batch may attend to nothing")
        elif causal:
            mask = torch.ones(width, total, dtype=torch.bool).tril(prefix)
        else:
            mask = None
        own = slots[request, :total]
        q = query[request * width : (request + 1) * width]
        attended = scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[own].to(q.dtype).transpose(0, 1)[None],
            values[own].to(q.dtype).transpose(0, 1)[None],
            attn_mask=mask,
            scale=scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        out.append(attended[0].transpose(0, 1))
    return torch.cat(out)
