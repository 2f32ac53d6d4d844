// A step of Mamba-2 on heap buffers of exact size, against sums in double: run under sanitizers by test_cpu_library.py.

#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "mamba.cpp"

namespace {

std::mt19937 chance(7);

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
    int64_t groups = between(1, 3), heads = groups * between(1, 3), state_dim = between(1, 40);
    int64_t head_dim = between(1, 90), width = between(1, 4), slots = between(1, 5), rows = between(0, slots);
    int64_t inner = heads * head_dim, channels = inner + 2 * groups * state_dim, state = state_dim * head_dim;
    bool biased = between(0, 1);
    int64_t row_size = inner + channels + heads;
    Numbers<T> projected{rows * row_size}, tails{slots * (width - 1) * channels}, conv{width * channels};
    Numbers<T> bias{channels};
    Numbers<float> states{slots * heads * state}, decay{heads}, step_bias{heads}, skip{heads};
    Numbers<float> convolved{rows * channels}, y{rows * inner};
    std::vector<int64_t> order;

    MambaStep job(int32_t type) {
        for (int64_t i = 0; i < rows; i++) order.push_back(slots - 1 - i);
        return {projected.data.get(), order.data(), tails.data.get(), states.data.get(), conv.data.get(),
                biased ? bias.data.get() : nullptr, decay.data.get(), step_bias.data.get(), skip.data.get(),
                convolved.data.get(), y.data.get(), rows, groups, heads, state_dim, head_dim, width, slots,
                row_size, (width - 1) * channels, heads * state, type};
    }
};

template <typename T>
bool works(int32_t type, int32_t threads) {
    Case<T> own;
    const MambaStep job = own.job(type);
    const std::vector<double> tails = own.tails.values(), states = own.states.values();
    if (sagellm_mamba_step(&job, threads) != DONE) return false;
    for (int64_t row = 0; row < own.rows; row++) {
        const int64_t slot = own.order[size_t(row)], at = row * own.row_size;
        std::vector<double> seen;
        for (int64_t c = 0; c < own.channels; c++) {
            double sum = own.projected[at + own.inner + c] * own.conv[(own.width - 1) * own.channels + c];
            for (int64_t t = 0; t + 1 < own.width; t++)
                sum += tails[size_t((slot * (own.width - 1) + t) * own.channels + c)] * own.conv[t * own.channels + c];
            seen.push_back(silu_of(own.biased ? sum + own.bias[c] : sum));
        }
        for (int64_t h = 0; h < own.heads; h++) {
            const int64_t g = h / (own.heads / own.groups);
            const double *write = &seen[size_t(own.inner + g * own.state_dim)];
            const double *read = &seen[size_t(own.inner + (own.groups + g) * own.state_dim)];
            const double step = std::log1p(std::exp(own.projected[at + own.inner + own.channels + h] + own.step_bias[h]));
            const double left = std::exp(-std::exp(own.decay[h]) * step);
            const int64_t first = (slot * own.heads + h) * own.state;
            for (int64_t j = 0; j < own.head_dim; j++) {
                const double value = seen[size_t(h * own.head_dim + j)];
                double out = value * own.skip[h];
                for (int64_t i = 0; i < own.state_dim; i++) {
                    const double now = states[size_t(first + i * own.head_dim + j)] * left + step * value * write[i];
                    if (!(std::fabs(now - own.states[first + i * own.head_dim + j]) < 1e-3)) return false;
                    out += now * read[i];
                }
                const double expected = out * silu_of(own.projected[at + h * own.head_dim + j]);
                if (!(std::fabs(own.y[row * own.inner + h * own.head_dim + j] - expected) <= 1e-3 * (1 + std::fabs(expected))))
                    return false;
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
