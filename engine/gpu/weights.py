"""Weights on the device in the published formats, laid out once as the kernels read them.

FP8 linears stay e4m3 with one E8M0 byte per 128 x 128 block; FP4 experts are shuffled by
``kernels/fp4_moe.pack_experts``; everything else is bf16 or float32 as published. A rank gets its
share by the table of ``engine/weights.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decant.engine.checkpoint import Checkpoint
from decant.engine.model_shape import ModelShape
from decant.engine.reference.ops import hadamard, rope_frequencies
from decant.engine.weights import E8M0, WeightReader, sharding
from decant.kernels.fp4_moe import PackedExperts, pack_experts, unpack_experts_ref
from decant.protocol.errors import CheckpointError

BLOCK = 128


@dataclass
class Linear:
    """[out, in] on the device: FP8 with block scales, or bf16 (``codes`` is None then)."""

    codes: Tensor | None  # e4m3 [N, K]
    scale: Tensor | None  # uint8 [N / 128, K / 128]
    plain: Tensor | None = None  # bf16 [N, K]; made on first use of an FP8 linear

    @property
    def num_rows(self) -> int:
        weight = self.codes if self.codes is not None else self.plain
        assert weight is not None
        return len(weight)

    def rows(self, start: int, end: int) -> Linear:
        """Some rows of an FP8 linear, in its memory; blocks must not be cut."""
        assert self.codes is not None and self.scale is not None and start % BLOCK == 0
        return Linear(self.codes[start:end], self.scale[start // BLOCK : -(-end // BLOCK)])

    def dense(self) -> Tensor:
        """bf16 [N, K]: exact, since e4m3 times a power of two is a bf16 number."""
        if self.plain is None:
            assert self.codes is not None and self.scale is not None
            rows, columns = self.codes.shape
            factor = E8M0.to(self.scale.device)[self.scale.int()]
            factor = factor.repeat_interleave(BLOCK, 0)[:rows]
            factor = factor.repeat_interleave(BLOCK, 1)[:, :columns]
            self.plain = (self.codes.float() * factor).bfloat16()
        return self.plain


@dataclass(frozen=True)
class Site:
    fn: Tensor  # f32 [24 or 4, S hidden]
    base: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Compressor:
    ratio: int
    ape: Tensor  # f32 [ratio, size]
    norm: Tensor  # bf16 [width]


@dataclass(frozen=True)
class Attention:
    ratio: int
    heads: int
    groups: int
    wq_kv: Linear  # rows of wq_a, then of wkv
    q_norm: Tensor
    kv_norm: Tensor
    wq_b: Linear
    wo_a: Linear
    wo_b: Linear
    sink: Tensor
    aux: Tensor | None  # bf16: compressor wkv, wgate; indexer wkv, wgate, weights_proj
    compressor: Compressor | None
    index: Compressor | None
    index_wq_b: Linear | None
    wq_both: Linear | None = None  # rows of wq_b, then of index_wq_b, which are parts of it


@dataclass
class Experts:
    gate: Tensor  # bf16 [experts, hidden]
    bias: Tensor | None
    table: Tensor | None  # int32 [vocab, top k]
    w13: PackedExperts
    w2: PackedExperts
    shared13: Linear
    shared2: Linear
    _dense: list[Tensor] = field(default_factory=list)

    def dense(self) -> tuple[Tensor, Tensor]:
        """Expert weights as float32 [E, 2 inner, hidden] and [E, hidden, inner] (plain torch
        path)."""
        if not self._dense:
            self._dense.extend(unpack_experts_ref(w) for w in (self.w13, self.w2))
        return self._dense[0], self._dense[1]


@dataclass(frozen=True)
class Layer:
    hc_attn: Site
    hc_ffn: Site
    attn_norm: Tensor
    ffn_norm: Tensor
    attn: Attention
    ffn: Experts | None


@dataclass(frozen=True)
class Head:
    site: Site
    norm: Tensor


@dataclass(frozen=True)
class Mtp:
    e_proj: Linear
    h_proj: Linear
    enorm: Tensor
    hnorm: Tensor
    layer: Layer
    head: Head


@dataclass(frozen=True)
class Weights:
    """All weights of one rank. plain, compressed: rotary frequencies f32 [32]."""

    embed: Tensor
    layers: list[Layer]
    head: Head | None
    vocabulary: Tensor  # bf16 [vocab share, hidden]
    mtp: Mtp | None
    plain: Tensor
    compressed: Tensor
    hadamard: Tensor  # f32 [128, 128]


class Loader:
    """Reads tensors of one rank onto a device. Raises: CheckpointError."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, tp: int, rank: int) -> None:
        self.shape, self.device, self.tp, self.rank = checkpoint.shape, device, tp, rank
        self._reader = WeightReader(checkpoint, tp, rank)
        self._entries = checkpoint.entries

    def _share(self, value: Tensor, how: str, name: str) -> Tensor:
        if self.tp == 1 or how == "replicated":
            return value
        axis = 0 if how == "rows" else 1
        if value.shape[axis] % self.tp:
            raise CheckpointError(
                f"tensor {name} cannot be split over {self.tp} ranks in its published blocks"
            )
        return value.chunk(self.tp, axis)[self.rank]

    @staticmethod
    def _check_blocks(name: str, how: str, codes: Tensor, scale: Tensor) -> None:
        blocks = tuple(-(-n // BLOCK) for n in codes.shape)
        if tuple(scale.shape) != blocks:
            raise CheckpointError(f"tensor {name} cannot be split by {how} in blocks of {BLOCK}")

    def _put(self, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return value.to(self.device, dtype or value.dtype, copy=True).contiguous()

    def bf16(self, name: str) -> Tensor:
        value = self._share(self._reader.raw(name), sharding(name), name)
        return self._put(value, torch.bfloat16)

    def f32(self, name: str) -> Tensor:
        return self._put(self._share(self._reader.raw(name), sharding(name), name), torch.float32)

    def has(self, name: str) -> bool:
        return name in self._entries

    def linear(self, *stems: str) -> Linear:
        """Linears with one input, rows after rows. FP8 with E8M0 scales stays FP8."""
        names = [stem + ".weight" for stem in stems]
        entries = [self._entries[n] for n in names]
        fp8 = all(e.dtype == "F8_E4M3" for e in entries) and all(
            self._entries[stem + ".scale"].dtype == "F8_E8M0" for stem in stems
        )
        shares = [
            self._entries[n].shape[0] // (self.tp if sharding(n) == "rows" else 1) for n in names
        ]
        fp8 = fp8 and all(n % BLOCK == 0 for n in shares[:-1])
        if fp8:
            codes, scales = [], []
            for name, stem in zip(names, stems, strict=True):
                how = sharding(name)
                codes.append(self._share(self._reader.raw(name), how, name))
                scales.append(self._share(self._reader.raw(stem + ".scale"), how, name))
                self._check_blocks(name, how, codes[-1], scales[-1])
            # float8 cannot be concatenated everywhere: bytes can
            joined = torch.cat([c.view(torch.uint8) for c in codes])
            return Linear(self._put(joined).view(torch.float8_e4m3fn), self._put(torch.cat(scales)))
        values = [self._reader.get(n).to(self.device, torch.bfloat16) for n in names]
        return Linear(None, None, torch.cat(values))

    def site(self, prefix: str) -> Site:
        return Site(*(self.f32(f"{prefix}_{end}") for end in ("fn", "base", "scale")))

    def head(self, prefix: str) -> Head:
        return Head(self.site(prefix + "hc_head"), self.bf16(prefix + "norm.weight"))

    def compressor(self, prefix: str, ratio: int) -> Compressor:
        return Compressor(ratio, self.f32(prefix + "ape"), self.bf16(prefix + "norm.weight"))

    def attention(self, prefix: str, ratio: int) -> Attention:
        aux, compressor, index, index_wq_b, both = [], None, None, None, None
        wq_b = None
        if ratio:
            name = prefix + "compressor."
            compressor = self.compressor(name, ratio)
            aux += [self.bf16(name + "wkv.weight"), self.bf16(name + "wgate.weight")]
        if ratio == 4:
            name = prefix + "indexer."
            index = self.compressor(name + "compressor.", 4)
            joined = self.linear(prefix + "wq_b", name + "wq_b")
            heads = self.shape.num_attention_heads // self.tp
            first = heads * self.shape.head_dim
            if joined.codes is not None:
                both = joined
                wq_b, index_wq_b = both.rows(0, first), both.rows(first, both.num_rows)
            else:
                index_wq_b = self.linear(name + "wq_b")
            for end in ("compressor.wkv", "compressor.wgate", "weights_proj"):
                aux.append(self.bf16(f"{name}{end}.weight"))
        return Attention(
            ratio=ratio,
            heads=self.shape.num_attention_heads // self.tp,
            groups=self.shape.o_groups // self.tp,
            wq_kv=self.linear(prefix + "wq_a", prefix + "wkv"),
            q_norm=self.bf16(prefix + "q_norm.weight"),
            kv_norm=self.bf16(prefix + "kv_norm.weight"),
            wq_b=wq_b or self.linear(prefix + "wq_b"),
            wo_a=self.linear(prefix + "wo_a"),
            wo_b=self.linear(prefix + "wo_b"),
            sink=self.f32(prefix + "attn_sink"),
            aux=torch.cat(aux) if aux else None,
            compressor=compressor,
            index=index,
            index_wq_b=index_wq_b,
            wq_both=both,
        )

    def projection(self, prefix: str, ends: tuple[str, ...]) -> PackedExperts:
        """One projection of all experts (w1 above w3, or w2), packed for the kernel."""
        codes, scales, globals_ = [], [], []
        for e in range(self.shape.n_routed_experts):
            for end in ends:
                stem = f"{prefix}experts.{e}.{end}"
                name = stem + ".weight"
                how, dtype = sharding(name), self._entries[name].dtype
                if dtype not in ("I8", "U8"):
                    raise CheckpointError(
                        f"tensor {name} is {dtype}: the GPU engine serves FP4 and NVFP4 experts"
                    )
                codes.append(self._share(self._reader.raw(name), how, name))
                end_of = ".scale" if dtype == "I8" else ".weight_scale"
                raw = self._reader.raw(stem + end_of).view(torch.uint8)
                scales.append(self._share(raw, how, name))
                if dtype == "U8":
                    factor = self._reader.raw(stem + ".weight_scale_2").reshape(1)
                    globals_.append(factor.expand(len(codes[-1])))
        num = self.shape.n_routed_experts

        def joined(parts: list[Tensor]) -> Tensor:
            return torch.cat(parts).view(num, -1, *parts[0].shape[1:]).to(self.device)

        scale = joined(scales)
        if globals_:
            factors = torch.cat(globals_).view(num, -1).to(self.device)
            return pack_experts(joined(codes), scale.view(torch.float8_e4m3fn), factors)
        return pack_experts(joined(codes), scale)

    def experts(self, prefix: str) -> Experts:
        hashed = self.has(prefix + "gate.tid2eid")
        shared = prefix + "shared_experts."
        table = None
        if hashed:
            table = self._reader.raw(prefix + "gate.tid2eid").int().to(self.device)
        return Experts(
            gate=self.bf16(prefix + "gate.weight"),
            bias=None if hashed else self.f32(prefix + "gate.bias"),
            table=table,
            w13=self.projection(prefix, ("w1", "w3")),
            w2=self.projection(prefix, ("w2",)),
            shared13=self.linear(shared + "w1", shared + "w3"),
            shared2=self.linear(shared + "w2"),
        )

    def layer(self, prefix: str, ratio: int, keys_only: bool = False) -> Layer:
        return Layer(
            hc_attn=self.site(prefix + "hc_attn"),
            hc_ffn=self.site(prefix + "hc_ffn"),
            attn_norm=self.bf16(prefix + "attn_norm.weight"),
            ffn_norm=self.bf16(prefix + "ffn_norm.weight"),
            attn=self.attention(prefix + "attn.", ratio),
            ffn=None if keys_only else self.experts(prefix + "ffn."),
        )

    def mtp(self, keys_only: bool) -> Mtp:
        return Mtp(
            e_proj=self.linear("mtp.0.e_proj"),
            h_proj=self.linear("mtp.0.h_proj"),
            enorm=self.bf16("mtp.0.enorm.weight"),
            hnorm=self.bf16("mtp.0.hnorm.weight"),
            layer=self.layer("mtp.0.", 0, keys_only),
            head=self.head("mtp.0."),
        )


def load_weights(
    checkpoint: Checkpoint,
    device: torch.device,
    trunk: bool,
    mtp: str,
    tp: int = 1,
    rank: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Weights:
    """One rank's weights. mtp: "full", "keys" (window keys only) or "none". progress: called with
    the layers done and their number. Raises: CheckpointError."""
    shape: ModelShape = checkpoint.shape
    shape.check_tp(tp)
    loader = Loader(checkpoint, device, tp, rank)
    layers = []
    count = shape.num_hidden_layers if trunk else 0
    for i in range(count):
        layers.append(loader.layer(f"layers.{i}.", shape.compress_ratios[i]))
        if progress is not None:
            progress(i + 1, count)
    return Weights(
        embed=loader.bf16("embed.weight"),
        layers=layers,
        head=loader.head("") if trunk else None,
        vocabulary=loader.bf16("head.weight"),
        mtp=loader.mtp(mtp == "keys") if mtp != "none" and shape.has_mtp else None,
        plain=rope_frequencies(shape, False).to(device),
        compressed=rope_frequencies(shape, True).to(device),
        hadamard=hadamard(128).to(device),
    )
