"""KV pages from one pool into another: gather by page number, in chunks, a look at the peer between
chunks.

Data sheet
  source    uint8 [pages, stride] of this process or mapped from a peer's pool (CUDA IPC)
  target    uint8 [pages, stride], own pool; pages are scattered on both sides
  kernel    program = (page, share of its bytes), 16 bytes a thread and access; 64-bit addresses
  liveness  a launch covers at most ``chunk_pages``; before each one the caller is asked whether the
            peer is alive, and a chunk that does not finish in time ends the copy: a kernel never
            waits for anything
  floor     bytes read plus bytes written over the copy rate
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

WORDS = 4096  # 32-bit words a program copies: 16 KiB


class CopyEnded(Exception):
    """The copy stopped early; ``pages_done`` pages are known to be complete."""

    def __init__(self, reason: str, pages_done: int) -> None:
        super().__init__(f"{reason} after {pages_done} pages")
        self.pages_done = pages_done


def copy_pages_ref(
    source: torch.Tensor, target: torch.Tensor, source_pages: list[int], target_pages: list[int]
) -> None:
    """Plain torch, page by page."""
    for a, b in zip(source_pages, target_pages, strict=True):
        target[b] = source[a]


@triton.jit(do_not_specialize=["pieces", "source_stride", "target_stride"])
def _copy_kernel(
    source, target, source_pages, target_pages, pieces, source_stride, target_stride,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Pages as 32-bit words; pieces and strides in units of 16 bytes, so that accesses are."""
    i = tl.program_id(0)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = word < pieces * 4
    a = source + tl.load(source_pages + i).to(tl.int64) * source_stride * 16
    b = target + tl.load(target_pages + i).to(tl.int64) * target_stride * 16
    a, b = a.to(tl.pointer_type(tl.int32)), b.to(tl.pointer_type(tl.int32))
    value = tl.load(a + word, mask=inside, other=0, eviction_policy="evict_first")
    tl.store(b + word, value, mask=inside)


def copy_pages(
    source: torch.Tensor,
    target: torch.Tensor,
    source_pages: torch.Tensor,
    target_pages: torch.Tensor,
    num_bytes: int | None = None,
) -> None:
    """target[target_pages[i]] = source[source_pages[i]] for every i. One launch.

    source, target uint8 [pages, stride], rows contiguous; page numbers int32 or int64 on the
    device. num_bytes: only the first bytes of each page (a multiple of 16), all by default.
    Raises ValueError for shapes that cannot be copied in 16-byte pieces.
    """
    num_bytes = source.shape[1] if num_bytes is None else num_bytes
    if source_pages.numel() != target_pages.numel():
        raise ValueError(f"{source_pages.numel()} pages do not go into {target_pages.numel()}")
    if not 0 < num_bytes <= min(source.shape[1], target.shape[1]):
        raise ValueError(f"pages of {source.shape[1]} and {target.shape[1]} bytes lack {num_bytes}")
    for name, tensor in (("source", source), ("target", target)):
        if tensor.stride(1) != 1 or tensor.stride(0) % 16 or tensor.data_ptr() % 16:
            raise ValueError(f"{name} rows must be contiguous and aligned to 16 bytes")
    if num_bytes % 16:
        raise ValueError(f"{num_bytes} bytes are no multiple of 16")
    count = source_pages.numel()
    if count == 0:
        return
    _copy_kernel[(count, triton.cdiv(num_bytes // 4, WORDS))](
        source,
        target,
        source_pages,
        target_pages,
        num_bytes // 16,
        source.stride(0) // 16,
        target.stride(0) // 16,
        WORDS=WORDS,
        num_warps=4,
    )


def copy_in_chunks(
    source: torch.Tensor,
    target: torch.Tensor,
    source_pages: torch.Tensor,
    target_pages: torch.Tensor,
    chunk_pages: int,
    is_alive: Callable[[], bool],
    wait: Callable[[], bool],
) -> int:
    """``copy_pages`` in launches of at most chunk_pages; returns the number of pages.

    is_alive says whether the peer still is there; it is asked before every launch and after the
    last. wait blocks until what was launched has run and returns False once its deadline has
    passed. At most two chunks are in flight. Raises CopyEnded when the peer is gone or late: what
    was copied of the chunks in flight must not be used.
    """
    if chunk_pages < 1:
        raise ValueError("a chunk has at least one page")
    count, done, launched = source_pages.numel(), 0, 0
    while done < count:
        while launched < count and launched - done < 2 * chunk_pages:
            if not is_alive():
                raise CopyEnded("the peer is gone", done)
            end = min(launched + chunk_pages, count)
            copy_pages(source, target, source_pages[launched:end], target_pages[launched:end])
            launched = end
        if not wait():
            raise CopyEnded("the copy is late", done)
        done = launched
    if not is_alive():  # its memory may have been given away while the last chunk was read
        raise CopyEnded("the peer is gone", 0)
    return count
