// The vector operations of the kernels, for the compiler's instruction set. `greater_of` returns b if one of both is
// NaN. `times_power` returns v x 2^exponent for whole exponents up to 127, and 0 for tiny results. `totals` stores the
// sums of four vectors.

#pragma once
#include <cstdint>
#include <cstring>

#include "numbers.h"

constexpr float LOG2_E = 1.44269504f;

#if defined(__AVX512F__)
#include <immintrin.h>

typedef __m512 Vector;
constexpr int64_t WIDTH = 16;

inline Vector zero() { return _mm512_setzero_ps(); }
inline Vector all(float value) { return _mm512_set1_ps(value); }
inline Vector load(const float *from) { return _mm512_loadu_ps(from); }
inline Vector multiply_add(Vector a, Vector b, Vector sum) { return _mm512_fmadd_ps(a, b, sum); }
inline float total(Vector v) { return _mm512_reduce_add_ps(v); }
inline Vector load(const Float16 *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}
inline void load_even_odd(const BFloat16 *from, Vector &even, Vector &odd) {
    const __m512i words = _mm512_loadu_si512(from);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(int32_t(0xffff0000u))));
}
inline Vector load(const BFloat16 *from) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}
inline void save(float *to, Vector v) { _mm512_storeu_ps(to, v); }
inline Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
inline Vector difference(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
inline Vector quotient(Vector a, Vector b) { return _mm512_div_ps(a, b); }
inline Vector greater_of(Vector a, Vector b) { return _mm512_max_ps(a, b); }
inline Vector nearest(Vector v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vector times_power(Vector v, Vector exponent) { return _mm512_scalef_ps(v, exponent); }
inline float greatest_of(Vector v) { return _mm512_reduce_max_ps(v); }
inline void totals(const Vector (&v)[4], float *to) {
    const Vector ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const Vector cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    const Vector all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

#elif defined(__AVX2__)
#include <immintrin.h>

typedef __m256 Vector;
constexpr int64_t WIDTH = 8;

inline Vector zero() { return _mm256_setzero_ps(); }
inline Vector all(float value) { return _mm256_set1_ps(value); }
inline Vector load(const float *from) { return _mm256_loadu_ps(from); }
inline Vector multiply_add(Vector a, Vector b, Vector sum) { return _mm256_fmadd_ps(a, b, sum); }
inline float total(Vector v) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}
inline Vector load(const Float16 *from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}
inline void load_even_odd(const BFloat16 *from, Vector &even, Vector &odd) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
    even = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(int32_t(0xffff0000u))));
}
inline Vector load(const BFloat16 *from) {
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}
inline void save(float *to, Vector v) { _mm256_storeu_ps(to, v); }
inline Vector multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
inline Vector difference(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
inline Vector quotient(Vector a, Vector b) { return _mm256_div_ps(a, b); }
inline Vector greater_of(Vector a, Vector b) { return _mm256_max_ps(a, b); }
inline Vector nearest(Vector v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vector times_power(Vector v, Vector exponent) {
    const Vector least = _mm256_set1_ps(-126.0f);
    const __m256i whole = _mm256_cvtps_epi32(_mm256_max_ps(least, exponent));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(127)), 23);
    const Vector product = _mm256_mul_ps(v, _mm256_castsi256_ps(power));
    return _mm256_andnot_ps(_mm256_cmp_ps(exponent, least, _CMP_LT_OQ), product);
}
inline float greatest_of(Vector v) {
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}
inline void totals(const Vector (&v)[4], float *to) {
    const Vector ab = _mm256_add_ps(_mm256_unpacklo_ps(v[0], v[1]), _mm256_unpackhi_ps(v[0], v[1]));
    const Vector cd = _mm256_add_ps(_mm256_unpacklo_ps(v[2], v[3]), _mm256_unpackhi_ps(v[2], v[3]));
    const Vector all = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

#else  // the compiler's own vectors: SSE2 on any x86-64, NEON on ARM

typedef float Vector __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
constexpr int64_t WIDTH = 4;

inline Vector zero() { return Vector{0, 0, 0, 0}; }
inline Vector all(float value) { return Vector{value, value, value, value}; }
inline Vector load(const float *from) {
    Vector value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
inline Vector multiply_add(Vector a, Vector b, Vector sum) { return a * b + sum; }
inline float total(Vector v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline Vector load(const Float16 *from) {
    return Vector{as_float(from[0]), as_float(from[1]), as_float(from[2]), as_float(from[3])};
}
inline void load_even_odd(const BFloat16 *from, Vector &even, Vector &odd) {
    Words words;
    std::memcpy(&words, from, sizeof words);
    even = reinterpret_cast<Vector>(words << 16);
    odd = reinterpret_cast<Vector>(words & 0xffff0000u);
}
inline Vector load(const BFloat16 *from) {
    return Vector{as_float(from[0]), as_float(from[1]), as_float(from[2]), as_float(from[3])};
}
inline void save(float *to, Vector v) { std::memcpy(to, &v, sizeof v); }
inline Vector multiply(Vector a, Vector b) { return a * b; }
inline Vector difference(Vector a, Vector b) { return a - b; }
inline Vector quotient(Vector a, Vector b) { return a / b; }
inline Vector greater_of(Vector a, Vector b) { return a > b ? a : b; }
// v + 1.5 x 2^23 has no bits for a fraction; its lowest bits are the whole number.
inline Vector nearest(Vector v) { return (v + 0x1.8p23f) - 0x1.8p23f; }
inline Vector times_power(Vector v, Vector exponent) {
    const Vector least = all(-126.0f), whole = greater_of(least, exponent) + 0x1.8p23f;
    const Words biased = reinterpret_cast<Words>(whole) - 0x4b400000u + 127u;
    return exponent < least ? zero() : v * reinterpret_cast<Vector>(biased << 23);
}
inline float greatest_of(Vector v) {
    const float low = v[0] > v[1] ? v[0] : v[1], high = v[2] > v[3] ? v[2] : v[3];
    return low > high ? low : high;
}
inline void totals(const Vector (&v)[4], float *to) {
    for (int i = 0; i < 4; i++) to[i] = total(v[i]);
}

#endif

// The first `count` < WIDTH elements, then zeros. Memory behind them is not read.
template <typename T>
Vector load_part(const T *from, int64_t count) {
    T part[WIDTH] = {};
    std::memcpy(part, from, size_t(count) * sizeof *from);
    return load(part);
}

// (2^f - 1) / f for |f| <= 1/2, by the Taylor series of 2^f.
inline Vector power_series(Vector f) {
    Vector sum = all(1.5403530e-4f);
    sum = multiply_add(sum, f, all(1.3333558e-3f));
    sum = multiply_add(sum, f, all(9.6181291e-3f));
    sum = multiply_add(sum, f, all(5.5504109e-2f));
    sum = multiply_add(sum, f, all(2.4022651e-1f));
    return multiply_add(sum, f, all(6.9314718e-1f));
}

// 2^x for x <= 0, to one or two units in the last place: 2^n times the series of 2^f, |f| <= 1/2. 0 below -126 or so,
// as for -inf; NaN for NaN.
inline Vector power_of_two(Vector x) {
    x = greater_of(all(-200.0f), x);
    const Vector whole = nearest(x), f = difference(x, whole);
    return times_power(multiply_add(power_series(f), f, all(1.0f)), whole);
}

// tanh(x / log2(e)), to a few units in the last place; NaN for NaN. With e = 2^-2x - 1, which is exact near 0, it is
// -e / (e + 2). Beyond 14 / log2(e) it is 1 in float32.
inline Vector tanh_of_log2(Vector x) {
    x = greater_of(all(-14.0f), x);
    x = greater_of(all(-14.0f), difference(zero(), x));  // now -x
    const Vector twice = multiply(x, all(2.0f)), whole = nearest(twice), f = difference(twice, whole);
    const Vector power = times_power(all(1.0f), whole);
    const Vector e = multiply_add(times_power(power_series(f), whole), f, difference(power, all(1.0f)));
    return quotient(difference(zero(), e), multiply_add(e, all(1.0f), all(2.0f)));
}
