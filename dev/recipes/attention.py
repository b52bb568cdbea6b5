"""
Attention within documents, in three forms: a dense mask, flex attention, variable-length attention.

    python dev/recipes/attention.py my_shards

The demo compares their outputs. Variable-length attention needs a GPU, and has not been run yet.
"""

import sys

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

sys.path.insert(0, ".")    # run this in the folder of dataloader.py
from dataloader import PackedLoader
from dataset import find_data
from tokenizer import find_tokenizer


def number_documents(inputs, bos):
    """The number of each token's document in this batch, (B, T). Each document begins with BOS."""
    begins = inputs == bos
    begins[:, 1:] &= ~begins[:, :-1]    # the BOS that fill a short row count as one document
    begins[:, 0] = True    # a row of packing="flat" can begin inside a document
    return begins.flatten().cumsum(0).view_as(begins) - 1

def dense_attention(q, k, v, document):
    """Works everywhere. q, k and v are (B, heads, T, head size)."""
    mask = (document[:, :, None] == document[:, None, :]).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])

def masked_flex_attention(q, k, v, document):
    """
    Skips blocks of other documents. On a GPU, compile flex_attention and create_block_mask: all shapes
    are fixed. On a CPU, there is no backward (torch 2.13). q, k and v are (B, heads, T, head size).
    """
    def same_document(b, head, i, j):
        return (i >= j) & (document[b, i] == document[b, j])

    B, T = document.shape
    mask = create_block_mask(same_document, B, None, T, T, device=document.device)
    return flex_attention(q, k, v, block_mask=mask)

def bounds_and_positions(document, most_documents):
    """
    For variable-length attention, which takes a batch as one sequence of B * T tokens: cu_seqlens,
    int32 (most_documents + 1,), and the position of each token in its document, (B * T,).
    most_documents: choose an upper bound for one batch, so that all shapes are fixed
    """
    document = document.flatten()
    n = document[-1] + 1
    assert n <= most_documents, f"a batch has {n} documents; raise most_documents"
    numbers = torch.arange(most_documents + 1, device=document.device)
    cu_seqlens = torch.searchsorted(document, numbers)    # B * T after the last document
    positions = torch.arange(len(document), device=document.device) - cu_seqlens[document]
    return cu_seqlens.to(torch.int32), positions

def varlen_attention(q, k, v, cu_seqlens, T):
    """q, k and v are (B * T, heads, head size), on a GPU."""
    from torch.nn.attention.varlen import varlen_attn
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, T, T, window_size=(-1, 0))

if __name__ == "__main__":
    B, T = 4, 128
    data = find_data(*sys.argv[1:])
    tokenizer, _ = find_tokenizer(None, [data], vocab_size=1024)
    with PackedLoader(tokenizer, B, T, "train", data_dir=data) as loader:
        inputs, _ = next(loader)
    document = number_documents(inputs, tokenizer.get_bos_token_id())
    q, k, v = torch.randn(3, B, 2, T, 16)
    dense, flex = dense_attention(q, k, v, document), masked_flex_attention(q, k, v, document)
    print(f"dense and flex attention differ by at most {(dense - flex).abs().max():.1e}")
    cu_seqlens, _ = bounds_and_positions(document, most_documents=B * T)
    print(f"documents begin at {cu_seqlens[:document.max() + 1].tolist()}")
