"""Forward and backward of train.py's attention by each kernel, at depth 12: which one should SDPA take?"""

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

B, H, T, D = 32, 6, 2048, 128

def milliseconds(attend, q, k, v):
    for i in range(15):
        if i == 5:    # the first ones compile
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
        attend(q, k, v).sum().backward()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 10

if __name__ == "__main__" and torch.cuda.is_available():
    options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = (torch.randn(B, H, T, D, **options) for _ in range(3))
    document = (torch.rand(B, T, device="cuda") < 1 / 600).cumsum(1)
    causal = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    dense = (document[:, :, None] == document[:, None, :]).tril()[:, None]

    def attends(row, head, query, key):
        return (query >= key) & (document[row, query] == document[row, key])
    blocks = create_block_mask(attends, B, None, T, T)
    print(f"causal, as SDPA chooses: {milliseconds(causal, q, k, v):.2f} ms")
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            print(f"causal, {backend.name}: {milliseconds(causal, q, k, v):.2f} ms")
    masked = functools.partial(F.scaled_dot_product_attention, attn_mask=dense)
    print(f"documents, dense mask: {milliseconds(masked, q, k, v):.2f} ms")
    flex = torch.compile(functools.partial(flex_attention, block_mask=blocks), dynamic=False)
    print(f"documents, flex attention: {milliseconds(flex, q, k, v):.2f} ms")
