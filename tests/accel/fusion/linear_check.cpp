// The kernels on heap buffers of exact size, against sums in double: run under sanitizers by test_cpu_library.py.

#include <cmath>
#include <cstdio>
#include <cstdlib>
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
                const double product = double(x.values[m * job.x_stride + k]) * weight.values[n * job.inputs + k];
                sum += product;
                size += std::fabs(product);
            }
            const float found = y[m * job.y_stride + n];
            if (!(std::fabs(found - sum) <= 1e-5 * size)) {
                std::printf("[%ld, %ld] of %ld x %ld x %ld, type %d: %g, not %g\n", long(m), long(n), long(job.rows),
                            long(job.outputs), long(job.inputs), job.weight_type, found, sum);
                return false;
            }
        }
    return true;
}

// The weight in panels of exact size, stored in two pieces.
std::unique_ptr<char[]> panels_of(const Numbers &weight, int64_t outputs, int64_t inputs, int32_t type,
                                  int32_t threads) {
    const int64_t size = type == FLOAT32 ? 4 : 2, group = type == BFLOAT16 ? 2 : 1, panel = sagellm_panel();
    const int64_t padded = (outputs + panel - 1) / panel * panel * ((inputs + group - 1) / group * group);
    std::unique_ptr<char[]> panels(new char[size_t(padded * size)]());
    const int64_t first = between(0, outputs);
    const Packing upper = {weight.bytes.get(), panels.get(), first, inputs, inputs, 0, type};
    const Packing lower = {weight.bytes.get() + first * inputs * size, panels.get(), outputs - first, inputs, inputs,
                           first, type};
    if (sagellm_pack(&upper, threads) != DONE || sagellm_pack(&lower, threads) != DONE) std::abort();
    return panels;
}

// One random job; false where the kernel is wrong.
bool one(int32_t weight_type) {
    const int64_t rows = between(1, between(0, 9) ? 70 : 800), outputs = between(1, 140);
    const int64_t inputs = between(1, between(0, 9) ? 200 : 2100);
    const Numbers x = numbers(rows * inputs, FLOAT32), weight = numbers(outputs * inputs, weight_type);
    const Numbers bias = numbers(outputs, FLOAT32);
    const int32_t threads = int32_t(between(1, 2));
    const std::unique_ptr<char[]> panels = panels_of(weight, outputs, inputs, weight_type, threads);
    std::unique_ptr<float[]> y(new float[size_t(rows * outputs)]);
    const bool with_bias = between(0, 1);
    const Linear job = {x.bytes.get(), panels.get(), with_bias ? bias.bytes.get() : nullptr, y.get(), rows, outputs,
                        inputs, inputs, outputs, FLOAT32, weight_type, FLOAT32};
    return sagellm_linear(&job, threads) == DONE &&
           agrees(job, x, weight, with_bias ? bias.values.get() : nullptr, y.get());
}

#if defined(__AVX512BF16__)
// x in bfloat16, whose last pair may be half behind the end of the buffer: nothing beside it is read.
bool in_pairs() {
    const int64_t rows = between(1, 70), outputs = between(1, 140), inputs = between(1, 200);
    const Numbers x = numbers(rows * inputs, BFLOAT16), weight = numbers(outputs * inputs, BFLOAT16);
    const std::unique_ptr<char[]> panels = panels_of(weight, outputs, inputs, BFLOAT16, 1);
    std::unique_ptr<uint16_t[]> rounded(new uint16_t[size_t(rows * outputs)]);
    std::unique_ptr<float[]> y(new float[size_t(rows * outputs)]);
    const Linear job = {x.bytes.get(), panels.get(), nullptr, rounded.get(), rows, outputs, inputs, inputs, outputs,
                        BFLOAT16, BFLOAT16, BFLOAT16};
    const Linear exact = {x.values.get(), panels.get(), nullptr, y.get(), rows, outputs, inputs, inputs, outputs,
                          FLOAT32, BFLOAT16, FLOAT32};
    if (sagellm_linear(&job, 2) != DONE || sagellm_linear(&exact, 2) != DONE) return false;
    for (int64_t i = 0; i < rows * outputs; i++)
        if (!(std::fabs(as_float(BFloat16{rounded[i]}) - y[i]) <= 0.01f * std::fabs(y[i]) + 1e-3f)) return false;
    return true;
}
#else
bool in_pairs() { return true; }
#endif

}  // namespace

int main() {
    for (int i = 0; i < 240; i++)
        if (!one(i % 3) || !in_pairs()) return 1;
    std::printf("240 jobs compared\n");
    return 0;
}
