// Round float32 to float16 or bfloat16 (BFLOAT), and back. NaNs are converted explicitly, as on the host's CPU, because
// the GPU's conversions return a single NaN. Only NaNs from additions are the GPU's.
#include "floats.cuh"
#include "memory.cuh"

#define PLAIN_HALF_NAN 0x7E00u

__device__ inline u16 narrowed(float value) {
    u32 bits = bits_of(value);
#if BFLOAT
    if (is_nan(value)) return (u16)((bits & SIGN) >> 16 | 0x7FC0u);
    return (u16)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
#else
    if (is_nan(value)) return (u16)((bits & SIGN) >> 16 | PLAIN_HALF_NAN | (bits >> 13 & 0x3FFu));
    return float_to_half(value);
#endif
}

__device__ inline float widened(u16 bits) {
#if BFLOAT
    return float_of((u32)bits << 16);
#else
    if ((bits & 0x7FFFu) > 0x7C00u) return float_of((bits & 0x8000u) << 16 | 0x7FC00000u | (bits & 0x3FFu) << 13);
    return half_to_float(bits);
#endif
}

// Return the rounded element. `lost` is the previous loss at first, then the new loss, if that is finite.
__device__ inline u16 narrowed_sum(float x, float &lost) {
    float value = x + lost;
    u16 bits = narrowed(value);
    float rounded = widened(bits);
    lost = is_finite(rounded) ? value - rounded : lost;
    return bits;
}

// before and after: residuals, which may be the same; null without residuals.
extern "C" __global__ void narrow(const float *x, const float *before, float *after, u8 *payload, u64 count) {
    bool wide = aligned<Four>(x) && aligned<Four>(before) && aligned<Four>(after) && aligned<FourHalves>(payload);
    u64 fours = wide ? count / 4 : 0;
    for (u64 i = thread(); i < fours; i += threads()) {
        Four v = ((const Four *)x)[i];
        FourHalves halves;
        if (before) {
            Four lost = ((const Four *)before)[i];
            UNROLL for (u32 k = 0; k < 4; ++k) halves.at[k] = narrowed_sum(v.at[k], lost.at[k]);
            ((Four *)after)[i] = lost;
        } else {
            UNROLL for (u32 k = 0; k < 4; ++k) halves.at[k] = narrowed(v.at[k]);
        }
        ((FourHalves *)payload)[i] = halves;
    }
    for (u64 i = 4 * fours + thread(); i < count; i += threads()) {
        if (before) {
            float lost = before[i];
            store(payload + 2 * i, narrowed_sum(x[i], lost));
            after[i] = lost;
        } else {
            store(payload + 2 * i, narrowed(x[i]));
        }
    }
}
KERNEL(narrow)

extern "C" __global__ void widen(const u8 *payload, float *out, u64 count, u32 add) {
    u64 fours = aligned<Four>(out) && aligned<FourHalves>(payload) ? count / 4 : 0;
    for (u64 i = thread(); i < fours; i += threads()) {
        FourHalves halves = ((const FourHalves *)payload)[i];
        Four v;
        UNROLL for (u32 k = 0; k < 4; ++k) v.at[k] = widened(halves.at[k]);
        put((Four *)out + i, v, add);
    }
    for (u64 i = 4 * fours + thread(); i < count; i += threads())
        put(out + i, widened(load<u16>(payload + 2 * i)), add);
}
KERNEL(widen)
