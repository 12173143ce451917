// Tiles of Code::dense in plain C++: the reference that every other implementation must equal byte for byte.
#include "codec/cpu.h"

namespace zipccl {
namespace cpu {
namespace {

using dense::Format;

constexpr uint8_t kUnnamed = 3;  // the code that leaves an element to the next level

uint64_t load_element(const uint8_t* p, uint32_t bytes) {
  uint64_t v = 0;
  std::memcpy(&v, p, bytes);
  return v;
}

uint64_t low_bits(uint32_t n) { return (uint64_t{1} << n) - 1; }

uint32_t exponent_of(const Format& f, uint64_t v) {
  return static_cast<uint32_t>(v >> f.mantissa_bits & low_bits(f.exponent_bits));
}

// Symbol of an exponent, 256 if it has none.
uint32_t symbol_of(const Format& f, uint32_t e) { return f.exponent_bits > 8 ? dense::narrow_exponent(e) : e; }

// Of those that a level names, the one of a code below 3.
uint8_t symbol_named(uint32_t named, uint32_t code) { return static_cast<uint8_t>(named >> (8 * code)); }

// Fields of 1, 2, 4 or 8 bits in an array.
void put(uint8_t* array, uint32_t bits, uint32_t i, uint32_t field) {
  array[i * bits / 8] = static_cast<uint8_t>(array[i * bits / 8] | field << (i * bits % 8));
}
uint32_t get(const uint8_t* array, uint32_t bits, uint32_t i) {
  return array[i * bits / 8] >> (i * bits % 8) & static_cast<uint32_t>(low_bits(bits));
}

// Calls each(bits of a field, its lowest bit in the rest, offset of its array in the unit).
template <typename Each>
void for_each_array(uint32_t bits, uint32_t m, const Each& each) {
  uint32_t low = 0, offset = 0;
  for (uint32_t width = 8; width > 0; width = low + 8 <= bits ? 8 : width / 2) {
    if (low + width > bits || (width < 8 && !(bits & width))) continue;
    each(width, low, offset);
    low += width;
    offset += dense::array_bytes(width, m);
  }
}

// Sign and mantissa of an element, without its lowest mantissa bits, in `bits` bits; and back.
uint64_t rest_of(const Format& f, uint32_t bits, uint64_t v) {
  const uint64_t sign = v >> (f.mantissa_bits + f.exponent_bits);
  return sign << (bits - 1) | (v & low_bits(f.mantissa_bits)) >> (f.mantissa_bits + 1u - bits);
}
uint64_t join(const Format& f, uint32_t bits, uint64_t rest, uint32_t symbol) {
  const uint64_t sign = rest >> (bits - 1), mantissa = rest & low_bits(bits - 1);
  const uint64_t e = f.exponent_bits > 8 ? dense::widen_exponent(symbol) : symbol;
  return sign << (f.mantissa_bits + f.exponent_bits) | e << f.mantissa_bits | mantissa << (f.mantissa_bits + 1u - bits);
}

dense::Choice choose(const uint8_t* symbols, uint32_t m) {
  uint32_t sum = 0, zeros = 0, h[dense::kCounted] = {};
  for (uint32_t i = 0; i < m; ++i) {
    sum += symbols[i];
    zeros += symbols[i] == 0;
  }
  const uint32_t mean = mean_exponent(sum, m - zeros);
  for (uint32_t i = 0; i < m; ++i) {
    const uint8_t place = static_cast<uint8_t>(symbols[i] - (mean - dense::kFirstCounted));
    if (place < dense::kCounted) ++h[place];
  }
  return dense::choose(mean, h, zeros, m);
}

// Writes the codes of all levels, the first to `codes`, the others and what no level names to `dynamic`, of which it
// returns the size.
uint32_t encode_symbols(const uint8_t* symbols, uint32_t m, dense::Choice choice, uint8_t* codes, uint8_t* dynamic) {
  uint8_t left[kTileValues];
  std::memcpy(left, symbols, m);
  uint8_t* const begin = dynamic;
  uint32_t n = m;
  for (int level = 0; level < dense::kLevels; ++level) {
    uint8_t* const to = level == 0 ? codes : dynamic;
    const uint32_t bytes = level == 0 ? dense::array_bytes(2, m) : dense::level_bytes(n);
    std::memset(to, 0, bytes);
    if (level > 0) dynamic += bytes;
    const uint32_t named = dense::level_symbols(choice.shape, choice.base, level);
    uint32_t unnamed = 0;
    for (uint32_t i = 0; i < n; ++i) {
      uint32_t code = 0;
      while (code < kUnnamed && symbol_named(named, code) != left[i]) ++code;
      put(to, 2, i, code);
      if (code == kUnnamed) left[unnamed++] = left[i];
    }
    n = unnamed;
  }
  std::memcpy(dynamic, left, n);
  return static_cast<uint32_t>(dynamic - begin) + n;
}

DenseTile encode(const Format& f, const uint8_t* src, uint32_t m, uint8_t* unit, uint8_t* dynamic) {
  if (std::memcmp(src, src + f.bytes, static_cast<size_t>(f.bytes) * (m - 1)) == 0) {
    std::memcpy(dynamic, src, f.bytes);
    return {dense::kConstant, 0, f.bytes};
  }
  const auto raw = [&]() -> DenseTile {
    const uint32_t bytes = f.bytes * m;
    std::memcpy(unit, src, bytes);
    std::memset(unit + bytes, 0, align_up(bytes) - bytes);
    return {dense::kRaw, 0, 0};
  };
  if (f.exponent_bits == 0) return raw();

  uint8_t symbols[kTileValues];
  uint64_t mantissas = 0;
  for (uint32_t i = 0; i < m; ++i) {
    const uint64_t v = load_element(src + f.bytes * i, f.bytes);
    const uint32_t symbol = symbol_of(f, exponent_of(f, v));
    if (symbol > 255) return raw();
    symbols[i] = static_cast<uint8_t>(symbol);
    mantissas |= v & low_bits(f.mantissa_bits);
  }
  const uint32_t rest = dense::choose_rest(f, mantissas), bits = dense::rest_bits(f, rest);
  const dense::Choice choice = choose(symbols, m);
  uint8_t codes[kTileValues / 4];
  const uint32_t size = encode_symbols(symbols, m, choice, codes, dynamic);
  if (!dense::window_pays(f, bits, size, m)) return raw();

  const uint32_t rests = dense::rest_bytes(bits, m);
  std::memset(unit, 0, rests);
  for_each_array(bits, m, [&](uint32_t width, uint32_t low, uint32_t offset) {
    for (uint32_t i = 0; i < m; ++i) {
      const uint64_t v = rest_of(f, bits, load_element(src + f.bytes * i, f.bytes));
      put(unit + offset, width, i, static_cast<uint32_t>(v >> low & low_bits(width)));
    }
  });
  std::memcpy(unit + rests, codes, dense::array_bytes(2, m));
  return {static_cast<uint8_t>(dense::kShapes * rest + static_cast<uint32_t>(choice.shape)), choice.base,
          static_cast<uint16_t>(size)};
}

// Symbols of a window tile. False: its codes do not fit its dynamic bytes.
bool decode_symbols(DenseTile tile, const uint8_t* codes, const uint8_t* dynamic, uint32_t m, uint8_t* symbols) {
  // Forwards, to see how many codes each level has, and where.
  const uint8_t* level_codes[dense::kLevels] = {codes};
  uint32_t count[dense::kLevels + 1] = {m}, used = 0;
  for (int level = 0; level < dense::kLevels; ++level) {
    if (level > 0) {
      level_codes[level] = dynamic + used;
      used += dense::level_bytes(count[level]);
      if (used > tile.dynamic) return false;
    }
    for (uint32_t i = 0; i < count[level]; ++i) count[level + 1] += get(level_codes[level], 2, i) == kUnnamed;
  }
  if (used + count[dense::kLevels] != tile.dynamic) return false;
  // Backwards: the symbols of a level's elements, from those that it leaves to the next.
  uint8_t next[kTileValues];
  std::memcpy(next, dynamic + used, count[dense::kLevels]);
  for (int level = dense::kLevels - 1; level >= 0; --level) {
    const uint32_t named = dense::level_symbols(dense::shape_of(tile.mode), tile.base, level);
    uint32_t from = count[level + 1];
    for (uint32_t i = count[level]; i-- > 0;) {  // from the end, so that `next` can be filled in place
      const uint32_t code = get(level_codes[level], 2, i);
      next[i] = code == kUnnamed ? next[--from] : symbol_named(named, code);
    }
  }
  std::memcpy(symbols, next, m);
  return true;
}

bool decode(const Format& f, DenseTile tile, const uint8_t* unit, const uint8_t* dynamic, uint32_t m, uint8_t* dst) {
  if (tile.mode == dense::kRaw) {
    std::memcpy(dst, unit, static_cast<size_t>(f.bytes) * m);
    return true;
  }
  if (tile.mode == dense::kConstant) {
    for (uint32_t i = 0; i < m; ++i) std::memcpy(dst + f.bytes * i, dynamic, f.bytes);
    return true;
  }
  const uint32_t bits = dense::rest_bits(f, dense::rest_of(tile.mode));
  uint8_t symbols[kTileValues];
  if (!decode_symbols(tile, unit + dense::rest_bytes(bits, m), dynamic, m, symbols)) return false;
  for (uint32_t i = 0; i < m; ++i) {
    uint64_t rest = 0;
    for_each_array(bits, m, [&](uint32_t width, uint32_t low, uint32_t offset) {
      rest |= static_cast<uint64_t>(get(unit + offset, width, i)) << low;
    });
    const uint64_t v = join(f, bits, rest, symbols[i] & static_cast<uint32_t>(low_bits(f.exponent_bits)));
    std::memcpy(dst + f.bytes * i, &v, f.bytes);
  }
  return true;
}

}  // namespace

const DenseKernels kDenseScalar = {encode, decode};

}  // namespace cpu
}  // namespace zipccl
