// One slot on the CPU: docs/dynamiq.md, sections 4 to 7. Loops are written for the compiler to vectorise, and compiled
// twice.
#include "quantizer/cpu.h"
#include "quantizer/fine.h"
#include "quantizer/paper.h"

#if defined(__GNUC__)
#define ZIPCCL_INLINE inline __attribute__((always_inline))
#else
#define ZIPCCL_INLINE inline
#endif

namespace zipccl {
namespace quantizer {
namespace {

constexpr uint32_t kLanes = kSuperGroup / 8;

// ---- Codes ----------------------------------------------------------------------------------------------------

// Pieces of kBytes bytes, one per lane, from bit kBit of the lanes' words on; advances `codes`.
template <typename Piece>
ZIPCCL_INLINE void put_run(const uint64_t* words, uint32_t bit, uint8_t*& codes) {
  Piece pieces[kLanes];
  for (uint32_t l = 0; l < kLanes; ++l) pieces[l] = static_cast<Piece>(words[l] >> bit);
  std::memcpy(codes, pieces, sizeof pieces);
  codes += sizeof pieces;
}
template <typename Piece>
ZIPCCL_INLINE void get_run(const uint8_t*& codes, uint32_t bit, uint64_t* words) {
  Piece pieces[kLanes];
  std::memcpy(pieces, codes, sizeof pieces);
  for (uint32_t l = 0; l < kLanes; ++l) words[l] |= static_cast<uint64_t>(pieces[l]) << bit;
  codes += sizeof pieces;
}

// Codes of up to 8 bits, taken from bit `shift` of code[] on.
template <uint32_t kWidth>
ZIPCCL_INLINE void put_words(const uint32_t* code, uint32_t shift, uint8_t*& codes) {
  constexpr uint32_t kMask = (1u << kWidth) - 1;
  uint64_t words[kLanes];
  for (uint32_t l = 0; l < kLanes; ++l) {
    uint64_t word = 0;
    for (uint32_t i = 0; i < 8; ++i) word |= static_cast<uint64_t>(code[8 * l + i] >> shift & kMask) << kWidth * i;
    words[l] = word;
  }
  if (kWidth & 8) put_run<uint64_t>(words, 0, codes);
  if (kWidth & 4) put_run<uint32_t>(words, 0, codes);
  if (kWidth & 2) put_run<uint16_t>(words, 8 * (kWidth & 4), codes);
  if (kWidth & 1) put_run<uint8_t>(words, 8 * (kWidth & 6), codes);
}

template <uint32_t kWidth>
ZIPCCL_INLINE void get_words(const uint8_t*& codes, uint32_t shift, uint32_t* code) {
  constexpr uint32_t kMask = (1u << kWidth) - 1;
  uint64_t words[kLanes] = {};
  if (kWidth & 8) get_run<uint64_t>(codes, 0, words);
  if (kWidth & 4) get_run<uint32_t>(codes, 0, words);
  if (kWidth & 2) get_run<uint16_t>(codes, 8 * (kWidth & 4), words);
  if (kWidth & 1) get_run<uint8_t>(codes, 8 * (kWidth & 6), words);
  for (uint32_t l = 0; l < kLanes; ++l)
    for (uint32_t i = 0; i < 8; ++i)
      code[8 * l + i] |= (static_cast<uint32_t>(words[l] >> kWidth * i) & kMask) << shift;
}

template <uint32_t kWidth>
ZIPCCL_INLINE void put_codes(const uint32_t* code, uint8_t* codes) {
  if constexpr (kWidth > 8) {
    put_words<8>(code, 0, codes);
    put_words<kWidth - 8>(code, 8, codes);
  } else {
    put_words<kWidth>(code, 0, codes);
  }
}

template <uint32_t kWidth>
ZIPCCL_INLINE void get_codes(const uint8_t* codes, uint32_t* code) {
  std::fill(code, code + kSuperGroup, 0u);
  if constexpr (kWidth > 8) {
    get_words<8>(codes, 0, code);
    get_words<kWidth - 8>(codes, 8, code);
  } else {
    get_words<kWidth>(codes, 0, code);
  }
}

// ---- Random numbers -------------------------------------------------------------------------------------------

// middle: see middle_of().
ZIPCCL_INLINE void offsets_of(const Draw& draw, float middle, float* w) {
  if (draw.nearest) {
    std::fill(w, w + kSuperGroup, middle);
    return;
  }
  constexpr uint32_t kWords = kSuperGroup / 4;
  const uint32_t signs = signs_of(draw.shared), scale = float_bits(draw.stratum.scale),
                 shift = float_bits(draw.stratum.shift);
  uint32_t x[kWords], y[kWords], sign[kWords];
  for (uint32_t j = 0; j < kWords; ++j) {
    const Words2 words = hash(draw.own.w[0], draw.own.w[1], j);
    x[j] = words.x;
    y[j] = words.y;
    sign[j] = signs >> j / 2 << 31;
  }
  float first[2][kWords], second[2][kWords];  // of x and y, which are used by even and odd coordinates
  for (uint32_t j = 0; j < kWords; ++j) {
    const Stratum even = {bits_float(scale ^ sign[j]), add(bits_float(shift ^ sign[j]), middle)};
    const Stratum odd = {-even.scale, sub(middle, bits_float(shift ^ sign[j]))};
    first[0][j] = offset(first_share(x[j]), even);
    first[1][j] = offset(first_share(y[j]), odd);
    second[0][j] = offset(second_share(x[j]), even);
    second[1][j] = offset(second_share(y[j]), odd);
  }
  for (uint32_t j = 0; j < kWords; ++j) {
    w[4 * j] = first[0][j];
    w[4 * j + 1] = first[1][j];
    w[4 * j + 2] = second[0][j];
    w[4 * j + 3] = second[1][j];
  }
}

// ---- Widths::fine ---------------------------------------------------------------------------------------------

template <uint32_t kWidth>
ZIPCCL_INLINE void pack_fine_codes(const float* y, const float* w, const float* inverse, uint8_t* codes) {
  uint32_t code[kSuperGroup];
  for (uint32_t g = 0; g < kGroups; ++g) {
    const uint32_t direction = float_bits(inverse[g]) & ~kMagnitude;
    for (uint32_t i = g * kGroup; i < (g + 1) * kGroup; ++i)
      code[i] = fine_code(y[i], inverse[g], bits_float(float_bits(w[i]) ^ direction), kWidth);
  }
  put_codes<kWidth>(code, codes);
}

template <uint32_t kWidth>
ZIPCCL_INLINE void unpack_fine_codes(const uint8_t* codes, const float* steps, float* y) {
  uint32_t code[kSuperGroup];
  get_codes<kWidth>(codes, code);
  for (uint32_t g = 0; g < kGroups; ++g)
    for (uint32_t i = g * kGroup; i < (g + 1) * kGroup; ++i) y[i] = add_fine_value(y[i], code[i], steps[g], kWidth);
}

ZIPCCL_INLINE void pack_fine(const Layout& layout, const Slot& slot, const Draw& draw, const float* y, uint8_t* part) {
  static constexpr float kZeros[kSuperGroup] = {};
  uint32_t index[kGroups], most = 0, any = 0;
  uint16_t reversed = 0;
  for (uint32_t g = 0; g < kGroups; ++g) {
    int32_t positive = 0;
    uint32_t negative = 0x80000000u;
    for (uint32_t i = g * kGroup; i < (g + 1) * kGroup; ++i) {
      positive = std::max(positive, static_cast<int32_t>(float_bits(y[i])));
      negative = std::max(negative, float_bits(y[i]));
    }
    const GroupNeed need =
        group_need(static_cast<uint32_t>(positive), negative & kMagnitude, slot.width, reach(slot.width));
    any = std::max(any, std::max(static_cast<uint32_t>(positive), negative & kMagnitude));
    index[g] = need.index;
    most = std::max(most, need.index);
    reversed = static_cast<uint16_t>(reversed | need.reversed << g);
  }
  const bool finite = any < kInfinity && exponent_of(most) < kNaNExponent;
  const uint32_t exponent = finite ? exponent_of(most) : kNaNExponent;
  if (!finite) {
    y = kZeros;
    std::fill(index, index + kGroups, 0u);
    reversed = 0;
  }

  uint8_t* scales = part + fine_scales_at(layout, slot.number);
  float inverse[kGroups];
  for (uint32_t g = 0; g < kGroups; g += 2) {
    const uint32_t low = scale_code(index[g], exponent), high = scale_code(index[g + 1], exponent);
    scales[g / 2] = static_cast<uint8_t>(low | high << 4);
    inverse[g] = low == 0 ? 0.0f : inverse_half(half_scale(low, exponent), inverse_factor(slot.width));
    inverse[g + 1] = high == 0 ? 0.0f : inverse_half(half_scale(high, exponent), inverse_factor(slot.width));
  }
  for (uint32_t g = 0; g < kGroups; ++g) inverse[g] = reversed >> g & 1 ? -inverse[g] : inverse[g];
  std::memcpy(part + fine_directions_at(layout, slot.number), &reversed, sizeof reversed);
  part[fine_exponents_at(layout, slot.number)] = static_cast<uint8_t>(exponent);

  float w[kSuperGroup];
  uint8_t* codes = part + slot.codes_at;
  if (slot.width != 0) offsets_of(draw, middle_of(slot.width), w);
  switch (slot.width) {
    case 1:
      return pack_fine_codes<1>(y, w, inverse, codes);
    case 2:
      return pack_fine_codes<2>(y, w, inverse, codes);
    case 3:
      return pack_fine_codes<3>(y, w, inverse, codes);
    case 4:
      return pack_fine_codes<4>(y, w, inverse, codes);
    case 5:
      return pack_fine_codes<5>(y, w, inverse, codes);
    case 6:
      return pack_fine_codes<6>(y, w, inverse, codes);
    case 7:
      return pack_fine_codes<7>(y, w, inverse, codes);
    case 8:
      return pack_fine_codes<8>(y, w, inverse, codes);
    case 9:
      return pack_fine_codes<9>(y, w, inverse, codes);
    case 10:
      return pack_fine_codes<10>(y, w, inverse, codes);
    case 11:
      return pack_fine_codes<11>(y, w, inverse, codes);
    case 12:
      return pack_fine_codes<12>(y, w, inverse, codes);
  }
}

ZIPCCL_INLINE void unpack_fine(const Layout& layout, const Slot& slot, const uint8_t* part, float* y) {
  const uint8_t* scales = part + fine_scales_at(layout, slot.number);
  const uint32_t exponent = part[fine_exponents_at(layout, slot.number)];
  if (exponent == kNaNExponent || slot.width == 0) {
    const float v = exponent == kNaNExponent ? bits_float(kNaN) : 0.0f;
    for (uint32_t i = 0; i < kSuperGroup; ++i) y[i] = add(y[i], v);
    return;
  }
  uint16_t reversed;
  std::memcpy(&reversed, part + fine_directions_at(layout, slot.number), sizeof reversed);
  float steps[kGroups];
  for (uint32_t g = 0; g < kGroups; ++g) {
    const float s = step(half_scale(scales[g / 2] >> 4 * (g & 1) & 15u, exponent), slot.width);
    steps[g] = slot.width > 1 && (reversed >> g & 1) ? -s : s;
  }
  const uint8_t* codes = part + slot.codes_at;
  switch (slot.width) {
    case 1:
      return unpack_fine_codes<1>(codes, steps, y);
    case 2:
      return unpack_fine_codes<2>(codes, steps, y);
    case 3:
      return unpack_fine_codes<3>(codes, steps, y);
    case 4:
      return unpack_fine_codes<4>(codes, steps, y);
    case 5:
      return unpack_fine_codes<5>(codes, steps, y);
    case 6:
      return unpack_fine_codes<6>(codes, steps, y);
    case 7:
      return unpack_fine_codes<7>(codes, steps, y);
    case 8:
      return unpack_fine_codes<8>(codes, steps, y);
    case 9:
      return unpack_fine_codes<9>(codes, steps, y);
    case 10:
      return unpack_fine_codes<10>(codes, steps, y);
    case 11:
      return unpack_fine_codes<11>(codes, steps, y);
    case 12:
      return unpack_fine_codes<12>(codes, steps, y);
  }
}

// ---- Widths::paper --------------------------------------------------------------------------------------------

constexpr LevelTable<1> kLevels2 = make_levels<1>(kEpsilon4);
constexpr LevelTable<7> kLevels4 = make_levels<7>(kEpsilon4);
constexpr LevelTable<127> kLevels8 = make_levels<127>(kEpsilon8);

template <uint32_t kWidth, uint32_t kTop>
ZIPCCL_INLINE void pack_paper_codes(const float* y, const float* w, const float* inverse,
                                    const LevelTable<kTop>& levels, uint8_t* codes) {
  uint32_t code[kSuperGroup];
  for (uint32_t g = 0; g < kGroups; ++g)
    for (uint32_t i = g * kGroup; i < (g + 1) * kGroup; ++i) code[i] = paper_code(y[i], inverse[g], w[i], levels);
  put_codes<kWidth>(code, codes);
}

template <uint32_t kWidth, uint32_t kTop>
ZIPCCL_INLINE void unpack_paper_codes(const uint8_t* codes, const float* scales, const LevelTable<kTop>& levels,
                                      float* y) {
  uint32_t code[kSuperGroup];
  get_codes<kWidth>(codes, code);
  for (uint32_t g = 0; g < kGroups; ++g) {
    for (uint32_t i = g * kGroup; i < (g + 1) * kGroup; ++i) {
      const float magnitude = mul(levels.level[code[i] & kTop], scales[g]);
      y[i] = add(y[i], code[i] > kTop ? -magnitude : magnitude);
    }
  }
}

ZIPCCL_INLINE void pack_paper(const Layout& layout, const Slot& slot, const Draw& draw, const float* y, uint8_t* part) {
  static constexpr float kZeros[kSuperGroup] = {};
  uint32_t most[kGroups], top = 0;
  for (uint32_t g = 0; g < kGroups; ++g) {
    most[g] = 0;
    for (uint32_t i = g * kGroup; i < (g + 1) * kGroup; ++i) most[g] = std::max(most[g], float_bits(y[i]) & kMagnitude);
    top = std::max(top, most[g]);
  }
  const uint16_t maximum = static_cast<uint16_t>(paper_maximum(top));
  if (maximum == kNaN >> 16) {
    y = kZeros;
    std::fill(most, most + kGroups, 0u);
  }
  const float inverse_maximum = maximum == 0 || maximum == kNaN >> 16 ? 0.0f : div(255.0f, bf16_to_float(maximum));
  uint8_t* scales = part + paper_scales_at(layout, slot.number);
  float inverse[kGroups];
  for (uint32_t g = 0; g < kGroups; ++g) {
    const float m = bits_float(most[g]);
    const float u = draw.nearest ? 0.5f : scale_uniform(hash(draw.own.w[2], draw.own.w[3], g).x);
    scales[g] = static_cast<uint8_t>(paper_scale(m, inverse_maximum, u));
    inverse[g] = m < kLeastScale ? 0.0f : div(1.0f, m);
  }
  std::memcpy(part + paper_maxima_at(layout, slot.number), &maximum, sizeof maximum);

  float w[kSuperGroup];
  offsets_of(draw, 0, w);
  uint8_t* codes = part + slot.codes_at;
  switch (slot.width) {
    case 2:
      return pack_paper_codes<2>(y, w, inverse, kLevels2, codes);
    case 4:
      return pack_paper_codes<4>(y, w, inverse, kLevels4, codes);
    case 8:
      return pack_paper_codes<8>(y, w, inverse, kLevels8, codes);
  }
}

ZIPCCL_INLINE void unpack_paper(const Layout& layout, const Slot& slot, const uint8_t* part, float* y) {
  uint16_t maximum;
  std::memcpy(&maximum, part + paper_maxima_at(layout, slot.number), sizeof maximum);
  float scales[kGroups];
  for (uint32_t g = 0; g < kGroups; ++g)
    scales[g] = paper_group_scale(part[paper_scales_at(layout, slot.number) + g], bf16_to_float(maximum));
  const uint8_t* codes = part + slot.codes_at;
  switch (slot.width) {
    case 2:
      return unpack_paper_codes<2>(codes, scales, kLevels2, y);
    case 4:
      return unpack_paper_codes<4>(codes, scales, kLevels4, y);
    case 8:
      return unpack_paper_codes<8>(codes, scales, kLevels8, y);
  }
}

// ---- Once per instruction set ---------------------------------------------------------------------------------

#define ZIPCCL_SLOT_KERNELS(name, target)                                                                           \
  target void pack_##name(Widths widths, const Layout& layout, const Slot& slot, const Draw& draw, const float* y,  \
                          uint8_t* part) {                                                                          \
    widths == Widths::fine ? pack_fine(layout, slot, draw, y, part) : pack_paper(layout, slot, draw, y, part);      \
  }                                                                                                                 \
  target void unpack_##name(Widths widths, const Layout& layout, const Slot& slot, const uint8_t* part, float* y) { \
    widths == Widths::fine ? unpack_fine(layout, slot, part, y) : unpack_paper(layout, slot, part, y);              \
  }                                                                                                                 \
  constexpr SlotKernels k_##name = {pack_##name, unpack_##name};

ZIPCCL_SLOT_KERNELS(portable, )
#if defined(__x86_64__)
ZIPCCL_SLOT_KERNELS(avx2, __attribute__((target("avx2,fma"))))
#endif

}  // namespace

const SlotKernels& slot_kernels() {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx2) return k_avx2;
#endif
  return k_portable;
}

}  // namespace quantizer
}  // namespace zipccl
