// The number formats of weights and activations, and their conversion to and from float.

#pragma once
#include <cstdint>
#include <cstring>

enum Type : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

struct BFloat16 {
    uint16_t bits;
};

struct Float16 {
    uint16_t bits;
};

inline float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float as_float(float value) { return value; }

inline float as_float(BFloat16 value) { return float_of_bits(uint32_t(value.bits) << 16); }

// A multiplication moves the exponent; it makes subnormals normal too.
inline float as_float(Float16 value) {
    const uint32_t magnitude = uint32_t(value.bits & 0x7fffu) << 13;
    const bool finite = (value.bits & 0x7c00u) != 0x7c00u;
    const float number = finite ? float_of_bits(magnitude) * 0x1p112f : float_of_bits(magnitude | 0x7f800000u);
    return (value.bits & 0x8000u) ? -number : number;
}

inline void round_to(float value, float &to) { to = value; }

// To nearest, ties to even; a NaN stays a NaN.
inline void round_to(float value, BFloat16 &to) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value)
        to.bits = uint16_t((bits >> 16) | 0x40u);
    else
        to.bits = uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline void round_to(float value, Float16 &to) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        to.bits = uint16_t(sign | 0x7e00u);
    } else if (magnitude >= 0x477ff000u) {  // 65520 and above: half way to the next number, had there been one
        to.bits = uint16_t(sign | 0x7c00u);
    } else if (magnitude < 0x38800000u) {  // subnormal: adding 1/2 leaves the 24 bits behind 2^-24, rounded
        const float shifted = float_of_bits(magnitude) + 0.5f;
        std::memcpy(&bits, &shifted, sizeof bits);
        to.bits = uint16_t(sign | (bits - 0x3f000000u));
    } else {
        to.bits = uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13));
    }
}
