// The kernel on heap buffers of exact size, against sums in double: run under sanitizers by test_cpu_library.py.

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "quantized.cpp"

namespace {

std::mt19937 chance(11);

int64_t between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(chance); }

// One random job; false where the kernel is wrong.
bool one(int32_t bits) {
    const int64_t rows = between(1, 70), outputs = between(1, 60), inputs = between(1, 200), per = between(1, 3);
    const int64_t groups = (inputs + 31) / 32, scale_groups = (groups + per - 1) / per, panels = (outputs + 15) / 16;
    const bool columns = between(0, 1), with_zeros = between(0, 1), with_order = between(0, 1);
    std::vector<uint8_t> codes(size_t(panels * groups * 64 * bits));
    std::vector<float> scales(size_t(panels * scale_groups * 16)), x(size_t(rows * inputs)), bias(size_t(outputs), 0.5f);
    std::vector<float> y(size_t(rows * outputs));
    std::vector<uint8_t> zeros(scales.size());
    std::vector<int32_t> order(static_cast<size_t>(inputs));
    std::normal_distribution<float> normal;
    for (auto &code : codes) code = uint8_t(between(0, 255));
    for (auto &scale : scales) scale = 0.01f * normal(chance);
    for (auto &zero : zeros) zero = uint8_t(between(0, (1 << bits) - 1));
    for (auto &value : x) value = normal(chance);
    for (int64_t k = 0; k < inputs; k++) order[size_t(k)] = int32_t(inputs - 1 - k);
    const Matrix matrix = {codes.data(), scales.data(), with_zeros ? zeros.data() : nullptr,
                           with_order ? order.data() : nullptr, outputs, inputs, per, FLOAT32, bits,
                           between(0, 1) ? 8 : 16};
    const int64_t row_stride = columns ? 1 : inputs, column_stride = columns ? rows : 1;
    const Rows job = {&matrix, x.data(), bias.data(), y.data(), rows, row_stride, column_stride, FLOAT32, FLOAT32};
    if (sagellm_linear_quantized(&job, int32_t(between(1, 2))) != DONE) return false;
    for (int64_t m = 0; m < rows; m++)
        for (int64_t n = 0; n < outputs; n++) {
            double sum = 0.5, size = 1.0;
            for (int64_t k = 0; k < inputs; k++) {
                const int64_t group = k / 32, four = k % 32 / 4, place = (n % 16) * 4 + k % 4;
                const uint8_t *from = &codes[size_t((n / 16 * groups + group) * 64 * bits)];
                const int64_t code = bits == 8 ? from[four * 64 + place]
                                   : four < 4  ? from[four * 64 + place] & 15
                                               : from[(four - 4) * 64 + place] >> 4;
                const size_t scale = size_t((n / 16 * scale_groups + group / per) * 16 + n % 16);
                const double w = double(code - (with_zeros ? zeros[scale] : 1 << (bits - 1))) * scales[scale];
                const int64_t column = with_order ? order[size_t(k)] : k;
                const double product = w * x[size_t(m * row_stride + column * column_stride)];
                sum += product;
                size += std::fabs(w) * 3.5;  // x is rounded to 1/127 of its group's largest, or half of that
            }
            const float found = y[size_t(m * outputs + n)];
            if (!(std::fabs(found - sum) <= size / 200)) {
                std::printf("[%ld, %ld] of %ld x %ld x %ld, %d bits: %g, not %g\n", long(m), long(n), long(rows),
                            long(outputs), long(inputs), bits, found, sum);
                return false;
            }
        }
    return true;
}

}  // namespace

int main() {
    for (int i = 0; i < 120; i++)
        if (!one(i % 2 ? 4 : 8)) return 1;
    std::printf("120 jobs compared\n");
    return 0;
}
