"""The quantiser in numpy, written from docs/dynamiq.md alone; numbers in brackets are its sections."""

import math
from dataclasses import dataclass, field

import numpy as np

F = np.float32
NONE = 0xFFFFFFFF
NAN_BITS = 0x7FC00000
REACH = {}
for _b in range(2, 13):
    _level = F((1 << (_b - 1)) / ((1 << _b) - 2))
    REACH[_b] = F(1) if _b == 2 else np.nextafter(np.nextafter(_level, F(2)), F(2))
INVERSE = np.array([float.fromhex(h) for h in ("0x1p0", "0x1.99998p-1", "0x1.55554p-1", "0x1.249236p-1")], F)


def bits(v):
    return np.asarray(v, F).view(np.uint32)


def from_bits(u):
    return np.asarray(u, np.uint32).view(F)


def to_bf16(v):
    """bf16 bits (uint16) of fp32 values, round to nearest even."""
    u = bits(v).astype(np.uint64)
    rounded = (u + 0x7FFF + (u >> 16 & 1)) >> 16
    return np.where(np.isnan(v), 0x7FC0, rounded).astype(np.uint16)


def from_bf16(h):
    return from_bits(np.asarray(h, np.uint32) << 16)


def align16(n):
    return -(-n // 16) * 16


@dataclass
class Shape:
    count: int
    domains: int = 1
    parts: int = 1
    widths: str = "fine"
    bits: float = 5.0
    # [1] and [2]
    J: int = field(init=False)
    slots: int = field(init=False)
    units: int = field(init=False)
    part_bytes: int = field(init=False)
    lowest: int = field(init=False)

    def __post_init__(self):
        fine = self.widths == "fine"
        self.domain_count = self.count // self.domains
        self.J = -(-self.domain_count // 256)
        self.slots = -(-self.J // self.parts)
        self.super_groups = self.J * self.domains
        self.stats_bytes = self.super_groups * (1 if fine else 4)
        budget = math.floor(float(F(self.bits)) * self.count) // 8
        available = max(0, budget - self.stats_bytes) // (self.domains * self.parts) // 16 * 16
        scales = align16((11 if fine else 18) * self.slots)
        self.lowest = 1 if fine and F(self.bits) < F(2.9) else 2
        high = 12 if fine else 8
        self.units = min(max(max(0, available - scales) // 32, self.lowest * self.slots), high * self.slots)
        if fine and self.units >= 4 * self.slots:
            self.lowest = 3
        self.part_bytes = 32 * self.units + scales if self.count else 0

    def span(self, super_group):
        domain, j = divmod(super_group, self.J)
        begin = domain * self.domain_count + 256 * j
        return begin, min(begin + 256, (domain + 1) * self.domain_count)

    def gather(self, x, super_group):
        begin, end = self.span(super_group)
        out = np.zeros(256, F)
        out[: end - begin] = x[begin:end]
        return out


# ---- [2] Statistics ---------------------------------------------------------------------------------------------


def tree(v):
    while v.shape[-1] > 1:
        v = v[..., 0::2] + v[..., 1::2]
    return v[..., 0]


def lane_sums(v):
    lanes = v.reshape(32, 8)
    total = lanes[:, 0].copy()
    for i in range(1, 8):
        total = total + lanes[:, i]
    return tree(total)


def statistics(shape, x):
    """uint8 [super-groups], or bf16 bits as uint16 [2 * super-groups]."""
    x = np.asarray(x, F)
    blocks = [shape.gather(x, s) for s in range(shape.super_groups)]
    with np.errstate(all="ignore"):
        if shape.widths == "paper":
            norms = np.array([lane_sums(b * b) for b in blocks], F)
            counts = [end - begin for begin, end in map(shape.span, range(shape.super_groups))]
            means = np.array([lane_sums(b) / F(n) for b, n in zip(blocks, counts, strict=True)], F)
            return np.concatenate([to_bf16(norms), to_bf16(means)])
        out = np.zeros(shape.super_groups, np.uint8)
        for s, b in enumerate(blocks):
            m = np.abs(b).reshape(16, 16).max(1)
            e = int(bits(tree(m * m)))
            if not np.isfinite(b).all():
                out[s] = 255
            elif m.any():
                out[s] = min(max(2 * (e >> 23) + ((e & 0x7FFFFF) >= 0x3504F3) - 93, 1), 254)
        return out


# ---- [3] The plan -----------------------------------------------------------------------------------------------


@dataclass
class Plan:
    rows: np.ndarray  # [domains, 13]; rows[d][b], rows[d][0] = slots
    order: np.ndarray  # [domains * parts, slots] super-groups
    means: np.ndarray  # fp32 [super-groups]

    def widths(self, domain):
        slots = self.order.shape[1]
        return [int((s < self.rows[domain][1:13]).sum()) for s in range(slots)]


def rows_of(shape, keys):
    ordered = np.sort(keys)

    def at_least(k):
        return len(ordered) - int(np.searchsorted(ordered, k))

    fine = shape.widths == "fine"
    base = -(-at_least(1) // shape.parts) if fine else shape.slots
    if fine:
        offsets = dict(zip(range(2, 13), [45, 38, 33, 28, 24, 20, 16, 12, 8, 4, 0], strict=True))
        promotions = [(offsets[b], 1, [b]) for b in range(shape.lowest + 1, 13)]
    else:
        promotions = [(79, 2, [3, 4]), (0, 4, [5, 6, 7, 8])]
    rest = shape.units - shape.lowest * base

    def promoted(t):
        counts = [at_least(min(max(t - offset, 1), 4096)) for offset, _, _ in promotions]
        return [min(base, (n + shape.parts // 2) // shape.parts) for n in counts]

    t, got = 4096 + promotions[0][0], [0] * len(promotions)
    while t > 1:
        more = promoted(t - 1)
        if sum(c * r for (_, c, _), r in zip(promotions, more, strict=True)) > rest:
            break
        t, got = t - 1, more
    left = rest - sum(c * r for (_, c, _), r in zip(promotions, got, strict=True))
    for wanted in (promoted(t - 1) if t > 1 else [base] * len(got), [base] * len(got)):
        for p, (_, cost, _) in enumerate(promotions):
            limit = base if p == 0 else got[p - 1]
            more = max(0, min(left // cost, min(wanted[p], limit) - got[p]))
            got[p] += more
            left -= more * cost
    rows = np.zeros(14, np.int64)
    rows[0] = shape.slots
    rows[1 : shape.lowest + 1] = base
    for (_, _, widths), r in zip(promotions, got, strict=True):
        rows[widths] = r
    return rows


def allocate(shape, stats, ranks):
    fine = shape.widths == "fine"
    all_keys = stats.astype(np.int64) if fine else (stats[: shape.super_groups].astype(np.int64) & 0x7FFF) >> 3
    all_rows = np.zeros((shape.domains, 14), np.int64)
    order = np.full((shape.domains * shape.parts, shape.slots), NONE, np.int64)
    for d in range(shape.domains):
        keys = all_keys[d * shape.J : (d + 1) * shape.J]
        rows = all_rows[d] = rows_of(shape, keys)
        rank = np.empty(shape.J, np.int64)
        rank[np.argsort(-keys, kind="stable")] = np.arange(shape.J)
        width = sum((rank < rows[b] * shape.parts).astype(np.int64) for b in range(1, 13))
        for b in range(13):
            height = rows[b] - rows[b + 1]
            for r, j in enumerate(np.flatnonzero(width == b)):
                order[d * shape.parts + r // height, rows[b + 1] + r % height] = d * shape.J + j
    means = np.zeros(shape.super_groups, F)
    if not fine:
        means = from_bf16(stats[shape.super_groups :]) / F(ranks)
    return Plan(all_rows, order, means)


# ---- [4] Packed parts -------------------------------------------------------------------------------------------


def words_to_bytes(code, b):
    words = [sum(int(c) << (b * i) for i, c in enumerate(lane)) for lane in code.reshape(32, 8)]
    out, at = b"", 0
    for power in (8, 4, 2, 1):
        if b & power:
            out += b"".join((w >> 8 * at & (1 << 8 * power) - 1).to_bytes(power, "little") for w in words)
            at += power
    return out


def bytes_to_words(data, b):
    words, at, position = [0] * 32, 0, 0
    for power in (8, 4, 2, 1):
        if b & power:
            for lane in range(32):
                piece = int.from_bytes(data[position : position + power], "little")
                words[lane] |= piece << 8 * at
                position += power
            at += power
    return np.array([w >> (b * i) & (1 << b) - 1 for w in words for i in range(8)], np.int64)


def put_codes(code, b):
    return words_to_bytes(code, b) if b <= 8 else words_to_bytes(code & 255, 8) + words_to_bytes(code >> 8, b - 8)


def get_codes(data, b):
    return bytes_to_words(data, b) if b <= 8 else bytes_to_words(data, 8) | bytes_to_words(data[256:], b - 8) << 8


# ---- [5] Random numbers -----------------------------------------------------------------------------------------


def philox(k0, k1, c0, c1, c2, c3):
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & NONE, (a >> 32) ^ c3 ^ k1, a & NONE
        k0, k1 = (k0 + 0x9E3779B9) & NONE, (k1 + 0xBB67AE85) & NONE
    return c0, c1, c2, c3


@dataclass
class Key:
    seed: int = 0
    step: int = 0
    bucket: int = 0
    index: int = 0
    of: int = 1
    nearest: bool = False

    def _block(self, tag, super_group):
        lo, hi = self.seed & NONE, self.seed >> 32
        k = philox(lo, hi, self.step & NONE, self.step >> 32, self.bucket, tag)
        return philox(k[0], k[1], super_group, 0, 0, 0)

    def own(self, super_group):
        return self._block(self.index, super_group)

    def shared(self, super_group):
        return self._block(NONE, super_group)


def permuted(index, of, p):
    B = max(1, (of - 1).bit_length())
    k = [p[i // 2] >> 16 * (i % 2) & 0xFFFF for i in range(6)]
    x = index
    while True:
        for r in range(6):
            x = (x + k[r]) * (k[(r + 1) % 6] >> 8 | 1) % (1 << B)
            x ^= x >> (B + 1) // 2
        if x < of:
            return (x + (p[3] * of >> 32)) % of


def hash_words(a, b, i):
    """Two words for each i."""
    x = (np.uint64(a) + np.asarray(i, np.uint64) * np.uint64(0x9E3779B9)) & np.uint64(NONE)
    product = x * np.uint64(0xD2511F53)
    mixed = (product ^ product >> np.uint64(32) ^ np.uint64(b)) & np.uint64(NONE)
    return tuple((mixed * np.uint64(factor)).astype(np.uint32) for factor in (0x846CA68B, 0x9E3779B1))


def fma(a, b, c):
    """a * b + c of fp32, rounded once: the sum, rounded to odd in fp64, keeps what decides the rounding to fp32."""
    product, c = a.astype(np.float64) * b.astype(np.float64), np.asarray(c, np.float64)
    total = product + c
    back = total - product
    lost = (product - (total - back)) + (c - back)
    even = (np.asarray(total).view(np.uint64) & np.uint64(1)) == 0
    away = np.where((lost > 0) == (total >= 0), np.inf, 0) * np.where(total < 0, -1, 1)
    odd = np.where((lost != 0) & even, np.nextafter(total, away), total)
    return odd.astype(F)


def offsets(key, super_group, middle=0):
    """w of the 256 coordinates."""
    middle = F(middle)
    if key.nearest:
        return np.full(256, middle)
    h, p = key.own(super_group), key.shared(super_group)
    spread = F(1 - 2**-15)
    scale = F(1) / F(key.of) * spread
    shift = F(permuted(key.index, key.of, p)) * scale - (scale + spread / F(2))
    words = hash_words(h[0], h[1], np.arange(64))
    upper = [np.uint32(0x3F800000) | word >> np.uint32(9) for word in words]
    lower = [np.uint32(0x3F800000) | (word << np.uint32(7) & np.uint32(0x7FFFFF)) for word in words]
    share = from_bits(np.stack(upper + lower, 1)).reshape(256)
    signs = int(hash_words(p[0], p[1], 0)[0])
    sign = np.array([-1 if (signs >> c // 8 ^ c) & 1 else 1 for c in range(256)], F)
    return fma(share, sign * scale, sign * shift + middle)


# ---- [6] fine ---------------------------------------------------------------------------------------------------


def half_of(code, exponent):
    index = 4 * exponent + code - 12
    return from_bits(np.where((code == 0) | (index < 0), 0, index) << 21)


def encode_fine(v, b, w):
    """Codes [256], group scales [16], directions [16], exponent of values v, fp32 [256]."""
    groups = v.reshape(16, 16)
    finite = np.isfinite(v).all()
    if finite:
        P = np.maximum(groups, 0).max(1)
        N = np.maximum(-groups, 0).max(1)
        reversed_ = (P > N) & (b > 1)
        half = np.maximum(P, N) / F(2)
        if b > 1:
            half = np.maximum(half, REACH[b] * np.minimum(P, N))
        index = np.where(np.maximum(P, N) == 0, 0, (bits(half).astype(np.int64) + 0x1FFFFF) >> 21)
        most = int(index.max())
        exponent = 0 if most == 0 else max(most >> 2, 16)
    if not finite or exponent >= 255:
        exponent, v = 255, np.zeros(256, F)
        index, reversed_ = np.zeros(16, np.int64), np.zeros(16, bool)
    scale = np.where(index == 0, 0, np.maximum(1, index - (4 * exponent - 12)))
    if b == 0:
        return np.zeros(256, np.int64), scale, reversed_, exponent
    half = half_of(scale, exponent)
    u = bits(half)
    inverse = INVERSE[u >> 21 & 3] * from_bits((np.uint32(255) - (u >> 23)) << 23)
    inverse = np.where(half == 0, F(0), inverse * F(2.0 ** (b - 3 if b > 1 else -3)))
    inverse = np.where(reversed_, -inverse, inverse).astype(F)
    inverse = np.repeat(inverse, 16)
    if b == 1:
        return np.rint(fma(v, inverse, w)).astype(np.int64), scale, reversed_, exponent
    L = 1 << (b - 1)
    w = np.where(np.repeat(reversed_, 16), -w, w)
    return np.minimum(np.rint(fma(v, inverse, w)).astype(np.int64) + L, 2 * L - 1), scale, reversed_, exponent


def add_fine(y, code, scale, reversed_, exponent, b):
    if exponent == 255:
        return np.full(256, np.nan, F)
    if b == 0:
        return y + F(0)
    half = half_of(scale, exponent)
    if b == 1:
        S = np.repeat(F(2) * half, 16)
        return y + np.where(code == 1, S, -S)
    D = half * F(2.0 ** (2 - b))
    return fma((code - (1 << (b - 1))).astype(F), np.repeat(np.where(reversed_, -D, D), 16), y)


# ---- [7] paper --------------------------------------------------------------------------------------------------


def levels(b):
    a = 1 + 2 * (0.08 if b == 8 else 0.20) ** 2
    R = (1 << (b - 1)) - 1
    power = [1.0]
    for _ in range(R):
        power.append(power[-1] * a)
    f = np.array([(p - 1) / (power[R] - 1) for p in power], F)
    gap = (1 / (f[1:].astype(np.float64) - f[:-1].astype(np.float64))).astype(F)
    return f, gap


def encode_paper(v, b, w, key, super_group):
    """Codes [256], group scales [16], super-group scale as bf16 bits."""
    most = F(np.abs(v).max()) if np.isfinite(v).all() else F(np.inf)
    up = 0 if most == 0 else (int(bits(max(most, F(2.0**-100)))) + 0xFFFF) >> 16
    if up >= 0x7F80:
        up, v = 0x7FC0, np.zeros(256, F)
    inverse_sf = F(0) if up in (0, 0x7FC0) else F(255) / from_bf16(up)
    m = np.abs(v).reshape(16, 16).max(1)
    h = key.own(super_group)
    u = F(0.5) if key.nearest else (hash_words(h[2], h[3], np.arange(16))[0] >> np.uint32(16)).astype(F) * F(2.0**-16)
    small = m < F(2.0**-100)
    scale = np.where(small, 0, np.floor(np.minimum(m * inverse_sf, F(255)) + u)).astype(np.int64)
    inverse = np.where(small, F(0), F(1) / np.where(small, F(1), m)).astype(F)
    z = np.minimum(np.abs(v) * np.repeat(inverse, 16), F(1))
    f, gap = levels(b)
    r = np.searchsorted(f[:-1], z, side="right") - 1
    w = np.where(np.signbit(v), -w, w)
    r = r + (F(0.5) - w < (z - f[r]) * gap[r])
    return r + (bits(v) >> 31).astype(np.int64) * (1 << (b - 1)), scale, up


def decode_paper(code, scale, up, b):
    f, _ = levels(b)
    group = scale.astype(F) * (from_bf16(up) * F(float.fromhex("0x1.010102p-8")))
    magnitude = f[code % (1 << (b - 1))] * np.repeat(group, 16)
    return np.where(code >= 1 << (b - 1), -magnitude, magnitude).astype(F)


# ---- Parts, and [8] ---------------------------------------------------------------------------------------------


def scale_bytes(shape, scales):
    """scales: per slot what encode_* gives besides the codes."""
    if shape.widths == "fine":
        nibbles = b"".join(bytes(int(s[2 * i]) | int(s[2 * i + 1]) << 4 for i in range(8)) for s, _, _ in scales)
        signs = b"".join(sum(int(d) << g for g, d in enumerate(ds)).to_bytes(2, "little") for _, ds, _ in scales)
        return nibbles + signs + bytes(e for _, _, e in scales)
    return b"".join(bytes(s.tolist()) for s, _ in scales) + b"".join(up.to_bytes(2, "little") for _, up in scales)


def pack(shape, plan, part, values, key):
    """Packed bytes of a part; values: fp32 [slots, 256]."""
    codes, scales = b"", []
    with np.errstate(all="ignore"):
        for s, b in enumerate(plan.widths(part // shape.parts)):
            super_group = int(plan.order[part, s])
            w = offsets(key, super_group, 0.5 if shape.widths == "fine" and b == 1 else 0)
            if shape.widths == "fine":
                code, *scale = encode_fine(values[s], b, w)
            else:
                code, *scale = encode_paper(values[s], b, w, key, super_group)
            codes += put_codes(code, b) if b else b""
            scales.append(scale)
    packed = codes.ljust(32 * shape.units, b"\0") + scale_bytes(shape, scales)
    return np.frombuffer(packed.ljust(shape.part_bytes, b"\0"), np.uint8)


def unpack(shape, plan, part, packed, y=None):
    """y and the part's values, fp32 [slots, 256]."""
    packed = np.asarray(packed, np.uint8)
    y = np.zeros((shape.slots, 256), F) if y is None else y
    out, at, end, slots = [], 0, 32 * shape.units, shape.slots
    data = packed.tobytes()
    with np.errstate(all="ignore"):
        for s, b in enumerate(plan.widths(part // shape.parts)):
            code = get_codes(data[at : at + 32 * b], b) if b else np.zeros(256, np.int64)
            at += 32 * b
            if shape.widths == "fine":
                nibbles = packed[end + 8 * s : end + 8 * s + 8].astype(np.int64)
                scale = np.stack([nibbles & 15, nibbles >> 4], 1).reshape(16)
                d = end + 8 * slots + 2 * s
                signs = np.array([int.from_bytes(data[d : d + 2], "little") >> g & 1 for g in range(16)], bool)
                out.append(add_fine(y[s], code, scale, signs, int(packed[end + 10 * slots + s]), b))
            else:
                scale = packed[end + 16 * s : end + 16 * s + 16].astype(np.int64)
                d = end + 16 * slots + 2 * s
                out.append(y[s] + decode_paper(code, scale, int.from_bytes(data[d : d + 2], "little"), b))
    return np.array(out, F)


def combine(shape, plan, part, x=None, x_means=0, packed=(), scale=1.0):
    """y of a part, fp32 [slots, 256]. x: fp32, the bucket."""
    y = np.zeros((shape.slots, 256), F)
    n = np.zeros(shape.slots, np.int64)
    mean = np.zeros((shape.slots, 1), F)
    for s, super_group in enumerate(plan.order[part]):
        if super_group != NONE:
            begin, end = shape.span(super_group)
            n[s] = end - begin
            mean[s] = plan.means[super_group]
            if x is not None:
                y[s] = shape.gather(x, super_group)
    with np.errstate(all="ignore"):
        if x is not None and x_means:
            y = y - F(x_means) * mean
        for data in packed:
            y = unpack(shape, plan, part, data, y)
        y = y * F(scale)
    y[np.arange(256) >= n[:, None]] = 0
    return y


def scatter(shape, plan, part, y, out, means=0):
    """Writes y, fp32 [slots, 256], to its places in the bucket `out`."""
    for s, super_group in enumerate(plan.order[part]):
        if super_group != NONE:
            begin, end = shape.span(super_group)
            v = y[s, : end - begin]
            out[begin:end] = v + F(means) * plan.means[super_group] if means else v
