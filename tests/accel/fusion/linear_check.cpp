// The kernels on heap buffers of exact size, against sums in double: run under sanitizers by test_cpu_library.py.

#include <cmath>
#include <cstdio>
#include <memory>
#include <random>

#include "linear.cpp"

namespace {

std::mt19937 chance(7);

int64_t between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(chance); }

// `count` numbers of a format, and what they are as floats.
struct Numbers {
    std::unique_ptr<char[]> bytes;
    std::unique_ptr<float[]> values;
};

Numbers numbers(int64_t count, int32_t type) {
    const size_t size = type == FLOAT32 ? 4 : 2;
    Numbers made = {std::unique_ptr<char[]>(new char[size_t(count) * size]),
                    std::unique_ptr<float[]>(new float[size_t(count)])};
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < count; i++) {
        const float value = normal(chance);
        if (type == FLOAT32) {
            made.values[i] = value;
            std::memcpy(&made.bytes[i * 4], &value, 4);
        } else {
            // The upper half of a float, or a float16 of exponent 2^-15 to 2^0, whatever the value was.
            const uint16_t bits = type == BFLOAT16 ? uint16_t(between(0x3c00, 0x3fff) | between(0, 1) << 15)
                                                   : uint16_t(between(0x0000, 0x3bff) | between(0, 1) << 15);
            std::memcpy(&made.bytes[i * 2], &bits, 2);
            made.values[i] = type == BFLOAT16 ? as_float(BFloat16{bits}) : as_float(Float16{bits});
        }
    }
    return made;
}

bool agrees(const Linear &job, const Numbers &x, const Numbers &weight, const float *bias, const float *y) {
    for (int64_t m = 0; m < job.rows; m++)
        for (int64_t n = 0; n < job.outputs; n++) {
            double sum = bias ? bias[n] : 0.0, size = std::fabs(sum) + 1e-6;
            for (int64_t k = 0; k < job.inputs; k++) {
                const double product = double(x.values[m * job.x_row_stride + k * job.x_column_stride]) *
                                       weight.values[n * job.weight_stride + k];
                sum += product;
                size += std::fabs(product);
            }
            const float found = y[m * job.y_row_stride + n * job.y_column_stride];
            if (!(std::fabs(found - sum) <= 1e-5 * size)) {
                std::printf("[%ld, %ld] of %ld x %ld x %ld, type %d: %g, not %g\n", long(m), long(n), long(job.rows),
                            long(job.outputs), long(job.inputs), job.weight_type, found, sum);
                return false;
            }
        }
    return true;
}

// One random job by both kernels; false where they are wrong.
bool one(int32_t weight_type) {
    const int64_t rows = between(1, 70), outputs = between(1, 110), inputs = between(1, between(0, 9) ? 200 : 2100);
    const bool columns = between(0, 1), transposed = between(0, 1), with_bias = between(0, 1);
    const Numbers x = numbers(rows * inputs, FLOAT32), weight = numbers(outputs * inputs, weight_type);
    const Numbers bias = numbers(outputs, FLOAT32);
    std::unique_ptr<float[]> y(new float[size_t(rows * outputs)]);
    const Linear job = {x.bytes.get(), weight.bytes.get(), with_bias ? bias.bytes.get() : nullptr, y.get(),
                        rows, outputs, inputs, columns ? 1 : inputs, columns ? rows : 1, inputs,
                        transposed ? 1 : outputs, transposed ? rows : 1, FLOAT32, weight_type};
    const float *added = with_bias ? bias.values.get() : nullptr;
    const int32_t threads = int32_t(between(1, 2));
    if (sagellm_linear_few(&job, threads) != DONE || !agrees(job, x, weight, added, y.get())) return false;
    if (weight_type == FLOAT32) return sagellm_linear_many(&job, threads) == NO_KERNEL;
    return sagellm_linear_many(&job, threads) == DONE && agrees(job, x, weight, added, y.get());
}

}  // namespace

int main() {
    for (int i = 0; i < 240; i++)
        if (!one(i % 3)) return 1;
    std::printf("240 jobs compared\n");
    return 0;
}
