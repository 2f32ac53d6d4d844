// A step of the gated delta rule on heap buffers of exact size, against sums in double: run under sanitizers by
// test_cpu_library.py.

#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "delta.cpp"

namespace {

std::mt19937 chance(5);

int64_t between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(chance); }

// Numbers of about unit size in T, in a buffer without a byte behind them.
template <typename T>
struct Numbers {
    std::unique_ptr<T[]> data;
    int64_t count;

    explicit Numbers(int64_t size) : data(new T[size_t(size)]), count(size) {
        for (int64_t i = 0; i < size; i++) round_to(float(between(-2000, 2000)) / 1000.0f, data[size_t(i)]);
    }
    double operator[](int64_t i) const { return as_float(data[size_t(i)]); }
    std::vector<double> values() const {
        std::vector<double> all;
        for (int64_t i = 0; i < count; i++) all.push_back((*this)[i]);
        return all;
    }
};

double silu_of(double x) { return x / (1.0 + std::exp(-x)); }

template <typename T>
struct Case {
    int64_t key_heads = between(1, 3), heads = key_heads * between(1, 3), key_dim = between(1, 40);
    int64_t value_dim = between(1, 90), width = between(1, 4), slots = between(1, 5), rows = between(0, slots);
    int64_t channels = 2 * key_heads * key_dim + heads * value_dim, state = key_dim * value_dim;
    Numbers<T> mixed{rows * (channels + heads * value_dim)}, gates{rows * 2 * heads};
    Numbers<T> tails{slots * (width - 1) * channels}, conv{width * channels}, norm{value_dim};
    Numbers<T> y{rows * heads * value_dim};
    Numbers<float> states{slots * heads * state}, decay{heads}, step_bias{heads};
    std::vector<int64_t> order;

    DeltaStep job(int32_t type) {
        for (int64_t i = 0; i < rows; i++) order.push_back(slots - 1 - i);
        return {mixed.data.get(), gates.data.get(), order.data(), tails.data.get(), states.data.get(),
                conv.data.get(), decay.data.get(), step_bias.data.get(), norm.data.get(), y.data.get(),
                rows, key_heads, heads, key_dim, value_dim, width, slots,
                channels + heads * value_dim, 2 * heads, (width - 1) * channels, heads * state, 1e-6f, type};
    }
};

template <typename T>
bool works(int32_t type, int32_t threads) {
    Case<T> own;
    const DeltaStep job = own.job(type);
    const std::vector<double> tails = own.tails.values(), states = own.states.values();
    if (sagellm_delta_step(&job, threads) != DONE) return false;
    const double bound = sizeof(T) == 4 ? 1e-4 : 3e-2;
    for (int64_t row = 0; row < own.rows; row++) {
        const int64_t slot = own.order[size_t(row)], at = row * (own.channels + own.heads * own.value_dim);
        std::vector<double> seen;
        for (int64_t c = 0; c < own.channels; c++) {
            double sum = own.mixed[at + c] * own.conv[(own.width - 1) * own.channels + c];
            for (int64_t t = 0; t + 1 < own.width; t++)
                sum += tails[size_t((slot * (own.width - 1) + t) * own.channels + c)] * own.conv[t * own.channels + c];
            seen.push_back(silu_of(sum));
        }
        for (int64_t h = 0; h < own.heads; h++) {
            const int64_t g = h / (own.heads / own.key_heads), keys = own.key_heads * own.key_dim;
            const double *query = &seen[size_t(g * own.key_dim)], *key = query + keys;
            const double *value = &seen[size_t(2 * keys + h * own.value_dim)];
            double queries = 1e-6, lengths = 1e-6, squares = 0.0;
            for (int64_t i = 0; i < own.key_dim; i++) queries += query[i] * query[i], lengths += key[i] * key[i];
            const double step = own.gates[row * 2 * own.heads + own.heads + h] + own.step_bias[h];
            const double left = std::exp(-std::exp(own.decay[h]) * std::log1p(std::exp(step)));
            const double beta = 1.0 / (1.0 + std::exp(-own.gates[row * 2 * own.heads + h]));
            const int64_t first = (slot * own.heads + h) * own.state;
            std::vector<double> out(size_t(own.value_dim), 0.0);
            for (int64_t j = 0; j < own.value_dim; j++) {
                double known = 0.0;
                for (int64_t i = 0; i < own.key_dim; i++)
                    known += states[size_t(first + i * own.value_dim + j)] * left * key[i] / std::sqrt(lengths);
                for (int64_t i = 0; i < own.key_dim; i++) {
                    const double now = states[size_t(first + i * own.value_dim + j)] * left +
                                       key[i] / std::sqrt(lengths) * beta * (value[j] - known);
                    if (!(std::fabs(now - own.states[first + i * own.value_dim + j]) < 1e-4)) return false;
                    out[size_t(j)] += now * query[i] / std::sqrt(queries * double(own.key_dim));
                }
                squares += out[size_t(j)] * out[size_t(j)];
            }
            const double scale = 1.0 / std::sqrt(squares / double(own.value_dim) + 1e-6);
            for (int64_t j = 0; j < own.value_dim; j++) {
                const double gate = own.mixed[at + own.channels + h * own.value_dim + j];
                const double expected = out[size_t(j)] * scale * own.norm[j] * silu_of(gate);
                const double found = own.y[(row * own.heads + h) * own.value_dim + j];
                if (!(std::fabs(found - expected) <= bound * (1 + std::fabs(expected)))) return false;
            }
        }
    }
    return true;
}

}  // namespace

int main() {
    for (int i = 0; i < 150; i++) {
        const int32_t threads = 1 + i % 3;
        if (!works<float>(FLOAT32, threads) || !works<BFloat16>(BFLOAT16, threads) || !works<Float16>(FLOAT16, threads)) {
            std::printf("job %d differs\n", i);
            return 1;
        }
    }
    std::printf("450 jobs compared\n");
    return 0;
}
