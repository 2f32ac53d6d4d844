// Attention on heap buffers of exact size, against sums in double: run under sanitizers by test_cpu_library.py.
// Blocks that no table names, and slots behind a sequence's last token, are NaN: whoever reads them is found out.

#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "attention.cpp"

namespace {

std::mt19937 chance(11);

int64_t between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(chance); }

constexpr uint16_t NO_NUMBER = 0x7fff;  // in both formats

// A buffer of one of the formats, and what its numbers are as floats.
struct Numbers {
    int32_t type;
    std::unique_ptr<char[]> bytes;
    std::vector<float> values;

    Numbers(int64_t count, int32_t kind) : type(kind), bytes(new char[size_t(count) * (kind == FLOAT32 ? 4 : 2)]) {
        values.assign(size_t(count), NAN);
        for (int64_t i = 0; i < count; i++) put(i, NO_NUMBER);
    }
    void put(int64_t i, uint16_t half) {
        values[size_t(i)] = type == FLOAT16 ? as_float(Float16{half}) : as_float(BFloat16{half});
        if (type == FLOAT32)
            std::memcpy(&bytes[size_t(i) * 4], &values[size_t(i)], 4);
        else
            std::memcpy(&bytes[size_t(i) * 2], &half, 2);
    }
    void draw(int64_t i) {
        const int64_t sign = between(0, 1) << 15;
        put(i, uint16_t(type == FLOAT16 ? between(0, 0x3bff) | sign : between(0x3c00, 0x3fff) | sign));
    }
};

struct Scene {
    std::vector<Span> spans;
    std::vector<int32_t> tables;
    int64_t rows = 0;
};

Scene scene(int64_t block_size, int64_t num_blocks) {
    Scene made;
    for (int64_t i = between(1, 3); i > 0; i--) {
        const int64_t tokens = between(0, 1) ? 1 : between(0, 40), start = between(0, 3) ? between(0, 90) : 150;
        made.spans.push_back({made.rows, tokens, start, int64_t(made.tables.size())});
        made.rows += tokens;
        for (int64_t b = (start + tokens + block_size - 1) / block_size; b > 0; b--)
            made.tables.push_back(int32_t(between(0, num_blocks - 1)));
    }
    return made;
}

// The slots of a pool that a span may read get numbers.
void fill(Numbers &pool, const Attention &job, int64_t dim, const Scene &scene) {
    const int64_t size = job.kv_heads * dim;
    for (const Span &span : scene.spans)
        for (int64_t p = 0; p < span.start + span.tokens; p++) {
            const int64_t block = scene.tables[size_t(span.table + p / job.block_size)];
            for (int64_t d = 0; d < size; d++) {
                const int64_t at = (block * job.block_size + p % job.block_size) * size + d;
                if (std::isnan(pool.values[size_t(at)])) pool.draw(at);
            }
        }
}

// One head of one row; false where it is wrong.
bool agrees(const Attention &job, const Span &span, int64_t token, int64_t head, const Numbers &query,
            const Numbers &keys, const Numbers &values, const char *out) {
    const int64_t position = span.start + token, dim = job.head_dim, row = span.first_row + token;
    const int64_t value_dim = job.value_dim;
    const float *q = &query.values[size_t((row * job.heads + head) * dim)];
    std::vector<double> sums(size_t(value_dim), 0.0);
    double total = job.sinks ? std::exp(double(job.sinks[head])) : 0.0;
    for (int64_t p = job.first_key(position); p <= position; p++) {
        const int64_t block = job.tables[span.table + p / job.block_size];
        const int64_t slot = block * job.block_size + p % job.block_size;
        const int64_t slot_head = slot * job.kv_heads + head / job.group();
        const size_t at = size_t(slot_head * dim), value_at = size_t(slot_head * job.values.head_stride);
        double score = 0.0;
        for (int64_t d = 0; d < dim; d++) score += double(q[d]) * keys.values[at + size_t(d)];
        score *= job.scale;
        if (job.softcap > 0) score = job.softcap * std::tanh(score / job.softcap);
        const double weight = std::exp(score);
        total += weight;
        for (int64_t d = 0; d < value_dim; d++) sums[size_t(d)] += weight * values.values[value_at + size_t(d)];
    }
    for (int64_t d = 0; d < value_dim; d++) {
        const int64_t i = (row * job.heads + head) * value_dim + d;
        const bool halves = query.type == BFLOAT16;
        const float found = halves ? as_float(reinterpret_cast<const BFloat16 *>(out)[i])
                                   : reinterpret_cast<const float *>(out)[i];
        const double expected = sums[size_t(d)] / total;
        if (!(std::fabs(found - expected) <= (halves ? 1e-2 : 1e-4) * (1 + std::fabs(expected)))) {
            std::printf("row %ld head %ld dim %ld: %g, not %g\n", long(row), long(head), long(d), found, expected);
            return false;
        }
    }
    return true;
}

bool one(int32_t query_type, int32_t pool_type) {
    const int64_t kv_heads = between(1, 3), group = between(1, 5), dim = between(1, 70), block_size = between(1, 9);
    const int64_t heads = kv_heads * group, num_blocks = between(1, 40), size = kv_heads * dim;
    const bool shared = between(0, 3) == 0;  // values are a part of the keys
    const int64_t value_dim = shared ? between(1, dim) : between(0, 1) ? dim : between(1, 70);
    const int64_t value_stride = shared ? dim : value_dim, value_size = kv_heads * value_stride;
    const Scene seen = scene(block_size, num_blocks);
    const int64_t slots = num_blocks * block_size, window = between(0, 1) ? 0 : between(1, 100);
    Numbers query(seen.rows * heads * dim, query_type), keys(slots * size, pool_type), values(slots * value_size, pool_type);
    for (int64_t i = 0; i < seen.rows * heads * dim; i++) query.draw(i);
    std::unique_ptr<char[]> out(new char[size_t(seen.rows * heads * value_dim) * (query_type == FLOAT32 ? 4 : 2)]);
    std::unique_ptr<int32_t[]> tables(new int32_t[seen.tables.size()]);
    std::copy(seen.tables.begin(), seen.tables.end(), tables.get());
    std::unique_ptr<float[]> sinks(between(0, 1) ? new float[size_t(heads)] : nullptr);
    for (int64_t h = 0; sinks && h < heads; h++) sinks[size_t(h)] = float(between(-40, 40)) / 10;
    const Attention job = {query.bytes.get(), out.get(), {keys.bytes.get(), block_size * size, size, dim},
                           {shared ? keys.bytes.get() : values.bytes.get(), block_size * value_size, value_size,
                            value_stride}, tables.get(), seen.spans.data(),
                           seen.rows, num_blocks, int64_t(seen.tables.size()), int64_t(seen.spans.size()),
                           heads, kv_heads, dim, value_dim, block_size, window,
                           between(0, seen.rows), heads * dim, dim,
                           heads * value_dim, value_dim, sinks.get(), 1.0f / std::sqrt(float(dim)),
                           between(0, 1) ? 0.0f : float(between(1, 50)), query_type, pool_type};
    fill(keys, job, dim, seen);
    if (!shared) fill(values, job, value_dim, seen);
    if (sagellm_paged_attention(&job, int32_t(between(1, 2))) != DONE) return false;
    for (const Span &span : seen.spans)
        for (int64_t token = 0; token < span.tokens; token++)
            for (int64_t head = 0; head < heads; head++)
                if (!agrees(job, span, token, head, query, keys, shared ? keys : values, out.get())) return false;
    return true;
}

}  // namespace

int main() {
    for (int i = 0; i < 200; i++)
        if (!one(i % 4 == 3 ? BFLOAT16 : FLOAT32, i % 4 == 3 ? BFLOAT16 : i % 4)) return 1;
    std::printf("200 jobs compared\n");
    return 0;
}
