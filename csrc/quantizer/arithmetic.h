// fp32 arithmetic that gives the same bits everywhere: every step rounded to nearest even, denormals kept, fused where
// mul_add() says so and nowhere else. Host files are compiled with -ffp-contract=off; on the device contraction is
// avoided by intrinsics.
#pragma once

#include "format/float16.h"

namespace zipccl {
namespace quantizer {

#if defined(__CUDA_ARCH__)
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float div(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float mul_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
#else
ZIPCCL_HD float add(float a, float b) { return a + b; }
ZIPCCL_HD float sub(float a, float b) { return a - b; }
ZIPCCL_HD float mul(float a, float b) { return a * b; }
ZIPCCL_HD float div(float a, float b) { return a / b; }
ZIPCCL_HD float mul_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }  // rounded once
#endif

// Rounds |v| < 2^22 to the nearest integer, ties to even: adding 1.5 * 2^23 leaves it in the low mantissa bits.
constexpr float kRounder = 12582912.0f;
constexpr uint32_t kRounderBits = 0x4B400000u;
ZIPCCL_HD int32_t nearest_integer(float v) { return static_cast<int32_t>(float_bits(add(v, kRounder)) - kRounderBits); }

constexpr uint32_t kMagnitude = 0x7FFFFFFFu;  // of float bits
constexpr uint32_t kInfinity = 0x7F800000u;
constexpr uint32_t kNaN = 0x7FC00000u;

}  // namespace quantizer
}  // namespace zipccl
