// Rows of elements of one type: whole and part vectors of them, sums of squares, activations.

#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "interface.h"
#include "numbers.h"
#include "vector.h"

#if defined(__AVX512F__)
inline void save(BFloat16 *to, Vector v) {
    const __m512i bits = _mm512_castps_si512(v), high = _mm512_srli_epi32(bits, 16);
    const __m512i half = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(high, _mm512_set1_epi32(1)));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i words = _mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm512_cvtepi32_epi16(words));
}
inline void save(Float16 *to, Vector v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__AVX2__)
inline void save(BFloat16 *to, Vector v) {
    const __m256i bits = _mm256_castps_si256(v), high = _mm256_srli_epi32(bits, 16);
    const __m256i half = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(high, _mm256_set1_epi32(1)));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i words = _mm256_blendv_epi8(rounded, quiet, is_nan);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm256_castsi256_si128(packed));
}
inline void save(Float16 *to, Vector v) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
#else
template <typename T>
void save(T *to, Vector v) {
    for (int i = 0; i < WIDTH; i++) round_to(v[i], to[i]);
}
#endif

// Loads the next `left` elements, at most one vector; missing elements are zero.
template <typename T>
Vector take(const T *from, int64_t left) {
    return left >= WIDTH ? load(from) : load_part(from, left);
}

template <typename T>
void put(T *to, Vector v, int64_t left) {
    if (left >= WIDTH) return save(to, v);
    T part[WIDTH];
    save(part, v);
    std::memcpy(to, part, size_t(left) * sizeof *to);
}

// Calls `body(i, left)` for each vector from `first` to `last`. For all but the last, `left` is a constant.
template <typename Body>
inline void by_vectors(int64_t first, int64_t last, const Body &body) {
    for (; last - first >= WIDTH; first += WIDTH) body(first, WIDTH);
    if (first < last) body(first, last - first);
}

// A sum of squares in four partial sums: additions to a single one would wait for each other.
struct Squares {
    Vector next = zero(), second = zero(), third = zero(), last = zero();

    void add(Vector v) {
        const Vector sum = multiply_add(v, v, next);
        next = second, second = third, third = last, last = sum;
    }
    float sum() const { return total((next + second) + (third + last)); }
    // The factor of RMSNorm (Zhang and Sennrich 2019).
    float scale(int64_t count, float eps) const { return 1.0f / std::sqrt(sum() / float(count) + eps); }
};

// exp(x): 0 and inf where exp has them, NaN for NaN.
inline Vector exponential(Vector x) {
    constexpr float HALF_LOG2_E = 0.72134752f;
    const Vector half = multiply(x, all(HALF_LOG2_E));
    const Vector bounded = difference(zero(), greater_of(all(-127.0f), difference(zero(), half)));
    const Vector root = power_of_two(bounded);
    return multiply(root, root);
}

// x / (1 + exp(-x)).
inline Vector silu(Vector x) { return x / (all(1.0f) + exponential(difference(zero(), x))); }

// Calls `call` with a value of the C++ type.
template <typename Call>
int32_t by_type(int32_t type, const Call &call) {
    switch (type) {
        case FLOAT32: return call(float{});
        case BFLOAT16: return call(BFloat16{});
        case FLOAT16: return call(Float16{});
        default: return NO_KERNEL;
    }
}
