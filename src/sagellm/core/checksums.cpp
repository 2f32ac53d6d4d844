// XXH3 with 64 bits and no seed, computed while bytes are copied.
//
// The algorithm is Yann Collet's, as doc/xxhash_spec.md of xxHash gives it for more than 240 bytes: 64 bytes
// (a stripe) are added to eight lanes with a secret that moves on by 8 bytes; after 16 stripes the lanes are
// scrambled. The last stripe has a place in the secret of its own. Here sizes are whole stripes, so a stripe
// never lies in two pieces.

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using Lanes = uint64_t __attribute__((vector_size(64)));

constexpr int64_t STRIPE = sizeof(Lanes);
constexpr int64_t STRIPES_PER_BLOCK = 16;
constexpr int64_t AHEAD = 4096;  // bytes that are fetched before they are read

constexpr uint64_t PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
constexpr uint64_t PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F,
                   PRIME64_3 = 0x165667B19E3779F9, PRIME64_4 = 0x85EBCA77C2B2AE63,
                   PRIME64_5 = 0x27D4EB2F165667C5;

// The constants of the algorithm ("default secret").
constexpr unsigned char SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};
constexpr int64_t SCRAMBLE_AT = sizeof(SECRET) - STRIPE, LAST_AT = SCRAMBLE_AT - 7, MERGE_AT = 11;

template <typename T>
T at(const void* address) {
  T value;
  std::memcpy(&value, address, sizeof value);
  return value;
}

// The products of the lower and the upper half of each lane.
Lanes half_products(Lanes keyed) {
#if defined(__AVX512F__)
  const auto whole = reinterpret_cast<__m512i>(keyed);
  return reinterpret_cast<Lanes>(_mm512_mul_epu32(whole, _mm512_srli_epi64(whole, 32)));
#else
  return (keyed & 0xFFFFFFFF) * (keyed >> 32);
#endif
}

Lanes neighbours(Lanes data) {
#if defined(__clang__)
  return __builtin_shufflevector(data, data, 1, 0, 3, 2, 5, 4, 7, 6);
#else
  return __builtin_shuffle(data, Lanes{1, 0, 3, 2, 5, 4, 7, 6});
#endif
}

struct Hash {
  Lanes lanes = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

  void add(Lanes data, int64_t secret_at) {
    lanes += neighbours(data) + half_products(data ^ at<Lanes>(SECRET + secret_at));
  }

  void scramble() {
    lanes = (lanes ^ (lanes >> 47) ^ at<Lanes>(SECRET + SCRAMBLE_AT)) * PRIME32_1;
  }

  uint64_t merged(int64_t size) const {
    uint64_t hash = static_cast<uint64_t>(size) * PRIME64_1;
    for (int lane = 0; lane < 8; lane += 2) {
      const unsigned char* secret = SECRET + MERGE_AT + lane * 8;
      const auto product = static_cast<unsigned __int128>(lanes[lane] ^ at<uint64_t>(secret)) *
                           (lanes[lane + 1] ^ at<uint64_t>(secret + 8));
      hash += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }
    hash ^= hash >> 37;
    hash *= 0x165667919E3779F9;
    return hash ^ (hash >> 32);
  }
};

// To memory that is not read soon: the cache neither fetches the old bytes nor keeps the new ones.
void store_past_cache(char* target, Lanes data) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(target), reinterpret_cast<__m512i>(data));
#elif defined(__AVX2__)
  __m256i halves[2];
  std::memcpy(halves, &data, sizeof data);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(target), halves[0]);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(target) + 1, halves[1]);
#else
  std::memcpy(target, &data, sizeof data);
#endif
}

enum class Write { NOTHING, CACHED, PAST_CACHE };

// Keeps the compiler from reading the source twice, once to copy and once to hash: another process may write
// there meanwhile, and the checksum is of what was copied.
Lanes once(Lanes data) {
#if defined(__AVX512F__)
  asm volatile("" : "+v"(data));
#elif defined(__AVX2__)
  __m256i halves[2];
  std::memcpy(halves, &data, sizeof data);
  asm volatile("" : "+x"(halves[0]), "+x"(halves[1]));
  std::memcpy(&data, halves, sizeof data);
#else
  asm volatile("" : "+m"(data));
#endif
  return data;
}

template <Write write>
Lanes taken(const char* source, char* target) {
  __builtin_prefetch(source + AHEAD);
  const Lanes data = write == Write::NOTHING ? at<Lanes>(source) : once(at<Lanes>(source));
  if constexpr (write == Write::PAST_CACHE) {
    store_past_cache(target, data);
  } else if constexpr (write == Write::CACHED) {
    std::memcpy(target, &data, sizeof data);
  }
  return data;
}

// The stripes of a piece. `left`: stripes of all pieces that are still to come, without the last one.
struct Progress {
  Hash hash;
  int64_t left, in_block = 0;

  template <Write write>
  void take(const char* source, char* target, int64_t stripes) {
    while (stripes) {
      if (!left) {
        hash.add(taken<write>(source, target), LAST_AT);
        return;
      }
      int64_t now = STRIPES_PER_BLOCK - in_block;
      if (now > stripes) now = stripes;
      if (now > left) now = left;
      for (int64_t stripe = 0; stripe < now; ++stripe) {
        hash.add(taken<write>(source, target), (in_block + stripe) * 8);
        source += STRIPE;
        if constexpr (write != Write::NOTHING) target += STRIPE;
      }
      in_block += now;
      stripes -= now;
      left -= now;
      if (in_block == STRIPES_PER_BLOCK) {
        hash.scramble();
        in_block = 0;
      }
    }
  }
};

struct Piece {
  int64_t address, size;
};

// Sources are read one behind the other and fill targets so; without targets they are only read.
uint64_t copied(const Piece* source, int64_t num_sources, const Piece* target, int64_t num_targets,
                bool past_cache) {
  int64_t size = 0, done = 0;
  for (int64_t piece = 0; piece < num_sources; ++piece) size += source[piece].size;
  Progress progress = {.left = size / STRIPE - 1};
  for (int64_t piece = 0; piece < num_sources; ++piece) {
    const auto* from = reinterpret_cast<const char*>(source[piece].address);
    int64_t left = source[piece].size;
    if (!num_targets) {
      progress.take<Write::NOTHING>(from, nullptr, left / STRIPE);
      continue;
    }
    while (left) {
      const int64_t now = left < target->size - done ? left : target->size - done;
      auto* to = reinterpret_cast<char*>(target->address) + done;
      if (past_cache && reinterpret_cast<uintptr_t>(to) % STRIPE == 0) {
        progress.take<Write::PAST_CACHE>(from, to, now / STRIPE);
      } else {
        progress.take<Write::CACHED>(from, to, now / STRIPE);
      }
      from += now;
      left -= now;
      done += now;
      if (done == target->size) {
        ++target;
        done = 0;
      }
    }
  }
  return progress.hash.merged(size);
}

}  // namespace

// Copies each of `count` chunks from its sources to its targets, or only reads it where it has no targets,
// and stores its checksum. `words` has for each chunk: how many sources and targets, then address and size of
// each source and of each target. Sizes in bytes are multiples of 64 and above 0, more than 240 in a chunk,
// and as many at its targets as at its sources; targets do not overlap sources. `past_cache`: targets are not
// read soon.
extern "C" __attribute__((visibility("default"))) void sagellm_copy_with_checksums(
    int64_t count, const int64_t* words, int past_cache, uint64_t* checksums) {
  for (int64_t chunk = 0; chunk < count; ++chunk) {
    const int64_t num_sources = words[0], num_targets = words[1];
    const auto* pieces = reinterpret_cast<const Piece*>(words + 2);
    checksums[chunk] = copied(pieces, num_sources, pieces + num_sources, num_targets, past_cache);
    words += 2 + 2 * (num_sources + num_targets);
  }
#if defined(__AVX2__)
  _mm_sfence();  // other threads see the copies once they are told of them
#endif
}
