// Sums of four products of 8-bit numbers, as VNNI computes them: WIDTH sums from a vector of 4 WIDTH codes (0 to 255)
// and four numbers (-127 to 127). Every form is exact: 4 x 255 x 127 is far below the limit of an int32.

#pragma once
#include <cstdint>
#include <cstring>

#include "vector.h"

inline int32_t four(const int8_t *from) {
    int32_t value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

#if defined(__AVX512F__)

typedef __m512i Bytes;
typedef __m512i Ints;

inline Bytes load_bytes(const uint8_t *from) { return _mm512_loadu_si512(from); }
inline Bytes low_halves(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Bytes high_halves(Bytes v) { return low_halves(_mm512_srli_epi16(v, 4)); }
inline Ints all_ints(int32_t value) { return _mm512_set1_epi32(value); }
inline Ints widened(const uint8_t *from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}
inline Ints product(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
inline Ints sum_of(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Vector floats(Ints v) { return _mm512_cvtepi32_ps(v); }
inline void save_bytes(int8_t *to, Vector whole) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(whole)));
}
#if defined(__AVX512VNNI__)
inline Ints dot(Bytes codes, const int8_t *x, Ints sum) { return _mm512_dpbusd_epi32(sum, codes, all_ints(four(x))); }
#else
// Even and odd bytes separately, as 16-bit numbers: the instruction for pairs of bytes saturates.
inline Ints dot(Bytes codes, const int8_t *x, Ints sum) {
    const __m512i v = all_ints(four(x)), even = _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8);
    const __m512i low = _mm512_and_si512(codes, _mm512_set1_epi16(255)), high = _mm512_srli_epi16(codes, 8);
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(low, even));
    return _mm512_add_epi32(sum, _mm512_madd_epi16(high, _mm512_srai_epi16(v, 8)));
}
#endif

#elif defined(__AVX2__)

typedef __m256i Bytes;
typedef __m256i Ints;

inline Bytes load_bytes(const uint8_t *from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)); }
inline Bytes low_halves(Bytes v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline Bytes high_halves(Bytes v) { return low_halves(_mm256_srli_epi16(v, 4)); }
inline Ints all_ints(int32_t value) { return _mm256_set1_epi32(value); }
inline Ints widened(const uint8_t *from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)));
}
inline Ints product(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
inline Ints sum_of(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Vector floats(Ints v) { return _mm256_cvtepi32_ps(v); }
inline void save_bytes(int8_t *to, Vector whole) {
    for (int64_t i = 0; i < WIDTH; i++) to[i] = int8_t(whole[i]);
}
inline Ints dot(Bytes codes, const int8_t *x, Ints sum) {
    const __m256i v = all_ints(four(x)), even = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8);
    const __m256i low = _mm256_and_si256(codes, _mm256_set1_epi16(255)), high = _mm256_srli_epi16(codes, 8);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(low, even));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(high, _mm256_srai_epi16(v, 8)));
}

#else

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));

inline Bytes load_bytes(const uint8_t *from) {
    Bytes v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
inline Bytes low_halves(Bytes v) { return v & 15; }
inline Bytes high_halves(Bytes v) { return v >> 4; }
inline Ints all_ints(int32_t value) { return Ints{value, value, value, value}; }
inline Ints widened(const uint8_t *from) { return Ints{from[0], from[1], from[2], from[3]}; }
inline Ints product(Ints a, Ints b) { return a * b; }
inline Ints sum_of(Ints a, Ints b) { return a + b; }
inline Vector floats(Ints v) { return Vector{float(v[0]), float(v[1]), float(v[2]), float(v[3])}; }
inline void save_bytes(int8_t *to, Vector whole) {
    for (int64_t i = 0; i < WIDTH; i++) to[i] = int8_t(whole[i]);
}
inline Ints dot(Bytes codes, const int8_t *x, Ints sum) {
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 4; k++) sum[i] += int32_t(codes[4 * i + k]) * x[k];
    return sum;
}

#endif
