// One token a row in one launch: see kernels/sampling.py for the rules and the noise.
//
// A cluster of CLUSTER blocks has one row; each block keeps its share of the processed logits in
// shared memory, so the row is read once. All truncations keep an upper set of the values, so each
// is a border: it is found by up to three histograms of 1,024 steps, each inside a step of the one
// before, with masses in units of 2^-44 (integers: the order of additions does not matter). Noise is
// made only where it can win.
//
// Build with CLUSTER, THREADS, LOGITS (type), HAS_MASK, HAS_PENALTY.
#include "device.cuh"

constexpr int BINS = 1024, LEVELS = 3, WARPS = THREADS / 32, EACH = BINS / THREADS;
constexpr float RANGE = 32.0f;  // e^-32 of the greatest probability: below, values count as one step
constexpr float GREEDY_BELOW = 1e-5f, LEAST_NOISE = -2.86f, MOST_NOISE = 17.4f;
constexpr int MASS_AT = 0, COUNT_AT = BINS * 8, SUM_AT = COUNT_AT + BINS * 4, WARP_AT = SUM_AT + 64;
constexpr int STATE_AT = WARP_AT + WARPS * 32, X_AT = STATE_AT + 128;
static_assert(BINS % THREADS == 0, "bins");
// Words of the state; best_of takes two, and no pair serves two uses that a slow block could mix up.
enum { PEAK = 0, BAD = 2, VALUE = 3, LOWEST = 5, BIN = 7, HERE, BEFORE, BEFORE_MASS = 10 };

DEVICE void meet() {
  if (CLUSTER > 1) sync_cluster();
  else sync_block();
}
DEVICE u32 peer_word(const void* p, int rank) {
  return CLUSTER > 1 ? as_bits(peer_load((const float*)p, rank)) : *(const u32*)p;
}
DEVICE u64 peer_mass(const u64* p, int rank) {
  return peer_word(p, rank) | (u64)peer_word((const u32*)p + 1, rank) << 32;
}
DEVICE u64 fixed(float x, float peak) { return (u64)(exp_(x - peak) * 17592186044416.0f); }  // 2^44

struct Best {  // the greatest value; of equal ones the lowest token
  float value;
  int token;
  DEVICE void take(float v, int t) {
    if (v > value || (v == value && t < token)) value = v, token = t;
  }
};
// Over the block, then over the cluster; every thread gets it. `at`: two words of the state.
DEVICE Best best_of(Best b, u8* shared, int at, int thread) {
  float* values = (float*)(shared + WARP_AT);
  int* tokens = (int*)(values + WARPS);
  UNROLL for (int mask = 16; mask; mask /= 2) b.take(lane_xor(b.value, mask), lane_xor(b.token, mask));
  sync_block();
  if (thread % 32 == 0) values[thread / 32] = b.value, tokens[thread / 32] = b.token;
  sync_block();
  if (thread == 0) {
    for (int w = 1; w < WARPS; w++) b.take(values[w], tokens[w]);
    ((float*)(shared + STATE_AT))[at] = b.value;
    ((int*)(shared + STATE_AT))[at + 1] = b.token;
  }
  meet();
  const u32* state = (const u32*)(shared + STATE_AT);
  Best all = {-infinity(), 0x7FFFFFFF};
  for (int s = 0; s < CLUSTER; s++) all.take(as_float(peer_word(state + at, s)), (int)peer_word(state + at + 1, s));
  return all;
}

struct Row {
  u8* shared;
  const float* x;  // this block's values
  int size, thread, rank;
  float peak;

  DEVICE static int bin_of(float v, float low, float inverse) {
    return v > low ? max_(0, min_(BINS - 1, (int)((v - low) * inverse))) : 0;
  }
  // The lowest value at or above `from` before which fewer than k values stand, or less than
  // `most` of mass (k = 0). Every thread of the cluster gets it.
  DEVICE float border(float from, int k, double most) const {
    u64* mass = (u64*)(shared + MASS_AT);
    int* count = (int*)(shared + COUNT_AT);
    u64* warp_mass = (u64*)(shared + WARP_AT);
    int *warp_count = (int*)(warp_mass + WARPS), *warp_bin = warp_count + WARPS;
    int* state = (int*)(shared + STATE_AT);
    u64* before_mass = (u64*)(state + BEFORE_MASS);
    float low = peak - RANGE, inverse = BINS / RANGE, lows[LEVELS], inverses[LEVELS];
    int bins[LEVELS], above = 0;
    bool done = false;
    UNROLL for (int l = 0; l < LEVELS; l++) bins[l] = -1;
    u64 above_mass = 0;
    UNROLL for (int level = 0; level < LEVELS; level++) {
      if (done) continue;
      sync_block();
      for (int i = thread; i < BINS; i += THREADS) mass[i] = 0, count[i] = 0;
      sync_block();
      for (int i = thread; i < size; i += THREADS) {
        const float v = x[i];
        if (!(v >= from) || v == -infinity()) continue;
        bool inside = true;
        UNROLL for (int l = 0; l < LEVELS; l++)
          if (l < level) inside = inside && bin_of(v, lows[l], inverses[l]) == bins[l];
        if (!inside) continue;
        const int bin = bin_of(v, low, inverse);
        add_shared(count + bin, 1);
        if (k == 0) add_shared(mass + bin, fixed(v, peak));
      }
      meet();
      // threads take the bins from the top; sums over the cluster
      u64 own_mass[EACH], all_mass = 0;
      int own_count[EACH], all_count = 0;
      UNROLL for (int i = 0; i < EACH; i++) {
        const int bin = BINS - 1 - (thread * EACH + i);
        own_mass[i] = 0, own_count[i] = 0;
        UNROLL for (int s = 0; s < CLUSTER; s++) {
          own_count[i] += (int)peer_word(count + bin, s);
          if (k == 0) own_mass[i] += peer_mass(mass + bin, s);
        }
        all_count += own_count[i], all_mass += own_mass[i];
      }
      int run_count = all_count;
      u64 run_mass = all_mass;
      UNROLL for (int by = 1; by < 32; by *= 2) {
        const int c = lane_up(run_count, by);
        const u64 m = lane_up(run_mass, by);
        if (thread % 32 >= by) run_count += c, run_mass += m;
      }
      meet();  // the histograms were read; the warps' places are free
      if (thread % 32 == 31) warp_count[thread / 32] = run_count, warp_mass[thread / 32] = run_mass;
      sync_block();
      run_count += above - all_count, run_mass += above_mass - all_mass;
      for (int w = 0; w < thread / 32; w++) run_count += warp_count[w], run_mass += warp_mass[w];
      int lowest = BINS, here = 0;
      int lowest_before = 0;
      u64 lowest_mass = 0;
      UNROLL for (int i = 0; i < EACH; i++) {
        const bool member = k ? run_count < k : (double)run_mass < most;
        if (own_count[i] && member) {
          lowest = BINS - 1 - (thread * EACH + i), here = own_count[i];
          lowest_before = run_count, lowest_mass = run_mass;
        }
        run_count += own_count[i], run_mass += own_mass[i];
      }
      const int mine = lowest;
      lowest = (int)lane_min((u32)lowest);
      if (thread % 32 == 0) warp_bin[thread / 32] = lowest;
      sync_block();
      for (int w = 0; w < WARPS; w++) lowest = min_(lowest, warp_bin[w]);
      if (mine == lowest && mine < BINS) {
        state[BIN] = mine, state[HERE] = here, state[BEFORE] = lowest_before;
        *before_mass = lowest_mass;
      }
      sync_block();
      bins[level] = lowest, lows[level] = low, inverses[level] = inverse;
      above = state[BEFORE], above_mass = *before_mass;
      low += lowest / inverse, inverse *= BINS;
      done = state[HERE] == 1;
    }
    float least = infinity();
    for (int i = thread; i < size; i += THREADS) {
      const float v = x[i];
      bool inside = v >= from && v > -infinity();
      UNROLL for (int l = 0; l < LEVELS; l++)
        if (bins[l] >= 0) inside = inside && bin_of(v, lows[l], inverses[l]) == bins[l];
      if (inside) least = minimum(least, v);
    }
    const Best found = best_of({-least, 0}, shared, LOWEST, thread);
    return -found.value;
  }
  DEVICE u64 mass_from(float from) const {
    u64* warp_mass = (u64*)(shared + WARP_AT);
    u64* own = (u64*)((int*)(shared + STATE_AT) + BEFORE_MASS);
    u64 sum = 0;
    for (int i = thread; i < size; i += THREADS)
      if (x[i] >= from && x[i] > -infinity()) sum += fixed(x[i], peak);
    UNROLL for (int mask = 16; mask; mask /= 2) sum += lane_xor(sum, mask);
    sync_block();
    if (thread % 32 == 0) warp_mass[thread / 32] = sum;
    sync_block();
    if (thread == 0) {
      sum = 0;
      for (int w = 0; w < WARPS; w++) sum += warp_mass[w];
      *own = sum;
    }
    meet();
    sum = 0;
    for (int s = 0; s < CLUSTER; s++) sum += peer_mass(own, s);
    meet();
    return sum;
  }
};

DEVICE void philox(u32 key0, u32 key1, u32 block, u32 choice, u32 position, u32* out) {
  u32 c0 = block, c1 = choice, c2 = position, c3 = 0;
  UNROLL for (int round = 0; round < 10; round++) {
    const u32 h0 = multiply_high(c0, 0xD2511F53u), l0 = c0 * 0xD2511F53u;
    const u32 h1 = multiply_high(c2, 0xCD9E8D57u), l1 = c2 * 0xCD9E8D57u;
    c0 = h1 ^ c1 ^ key0, c1 = l1, c2 = h0 ^ c3 ^ key1, c3 = l0;
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}
DEVICE float gumbel(u32 bits) {
  const int top = (int)(bits >> 8);
  const float u = (top + 0.5f) * 5.9604644775390625e-08f;
  const float rest = ((16777215 - top) + 0.5f) * 5.9604644775390625e-08f;
  const float near = rest * (1.0f + rest * (0.5f + rest * (0.3333333333f + rest * 0.25f)));
  return -log_(rest < 0.01f ? near : -log_(u));
}

// Two blocks a multiprocessor where they fit: a row waits more than it works.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int BLOCKS = 1;
#else
constexpr int BLOCKS = THREADS == 512 ? 2 : 1;
#endif

KERNEL(THREADS, BLOCKS)
sample_kernel(const void* logits, const u32* allowed, const short* counts, const u8* seen,
              const int* slot_of_row, const float* temperature, const float* repetition,
              const float* presence, const float* frequency, const i64* seeds, const int* choices,
              const int* positions, const int* top_k, const float* top_p, const float* min_p,
              int* tokens, int vocab, i64 logits_stride, i64 counts_stride) {
  SHARED_BYTES(shared);
  let_next_start();
  await_previous();
  const int thread = thread_id(), rank = CLUSTER > 1 ? cluster_rank() : 0, row = block_y();
  const int quads = (vocab + 3) / 4, share = (quads + CLUSTER - 1) / CLUSTER;
  const int first = min_(rank * share, quads), last = min_(first + share, quads);
  float* x = (float*)(shared + X_AT);
  int* state = (int*)(shared + STATE_AT);
  const float t = temperature[row];
  const bool greedy = t < GREEDY_BELOW;
  const float inverse = 1.0f / (greedy ? 1.0f : t);
  const i64 slot = HAS_PENALTY ? slot_of_row[row] : 0;
  const i64 base = row * logits_stride;
  const bool wide = LOGITS == 0 && vocab % 4 == 0 && logits_stride % 4 == 0;
  if (thread == 0) state[BAD] = 0;
  sync_block();
  Best best = {-infinity(), 0x7FFFFFFF};
  bool bad = false;
  for (int q = first + thread; q < last; q += THREADS) {
    float v[4];
    if (wide) {
      Element<0>::unpack(load16((const float*)logits + base + q * 4), v);
    } else {
      UNROLL for (int j = 0; j < 4; j++)
        v[j] = q * 4 + j < vocab ? Element<LOGITS>::load(logits, base + q * 4 + j) : -infinity();
    }
    UNROLL for (int j = 0; j < 4; j++) {
      const int i = q * 4 + j;
      if (i < vocab) {
        bad = bad || v[j] != v[j] || v[j] == infinity();
        if (HAS_MASK && !(allowed[(i64)row * ((vocab + 31) / 32) + i / 32] >> (i % 32) & 1)) v[j] = -infinity();
        if (HAS_PENALTY) {
          const float count = counts[slot * counts_stride + i], r = repetition[row];
          if (seen[slot * counts_stride + i]) v[j] = v[j] > 0.0f ? v[j] / r : v[j] * r;
          if (count > 0.0f) v[j] -= presence[row] + frequency[row] * count;
        }
        v[j] *= inverse;
        best.take(v[j], i);
      }
      x[(q - first) * 4 + j] = v[j];
    }
  }
  if (bad) state[BAD] = 1;
  best = best_of(best, shared, PEAK, thread);
  bool usable = best.value > -infinity();
  for (int s = 0; s < CLUSTER; s++) usable = usable && peer_word(state + BAD, s) == 0;
  if (usable && !greedy) {
    const Row values = {shared, x, (last - first) * 4, thread, rank, best.value};
    const float p = top_p[row], least = min_p[row];
    const int k = top_k[row] > 0 ? top_k[row] : vocab;
    float border = -infinity();
    if (k < vocab) border = values.border(border, k, 0.0);
    if (p < 1.0f) border = values.border(border, 0, (double)p * (double)values.mass_from(border));
    const u32 key0 = (u32)seeds[row], key1 = (u32)((u64)seeds[row] >> 32);
    Best drawn = {-infinity(), 0x7FFFFFFF};
    float floor = values.peak + LEAST_NOISE;
    for (int q = first + thread; q < last; q += THREADS) {
      const float* v = x + (q - first) * 4;
      const float most = maximum(maximum(v[0], v[1]), maximum(v[2], v[3]));
      if (!(most >= border) || most + MOST_NOISE < floor) continue;
      u32 bits[4];
      philox(key0, key1, (u32)q, (u32)choices[row], (u32)positions[row], bits);
      UNROLL for (int j = 0; j < 4; j++) {
        if (!(v[j] >= border) || v[j] == -infinity() || v[j] + MOST_NOISE < floor) continue;
        if (least > 0.0f && exp_(v[j] - values.peak) < least) continue;
        drawn.take(v[j] + gumbel(bits[j]), q * 4 + j);
      }
      floor = maximum(floor, drawn.value);
    }
    best = best_of(drawn, shared, VALUE, thread);
  }
  if (rank == 0 && thread == 0) tokens[row] = usable ? best.token : -1;
  if (CLUSTER > 1) sync_cluster();  // no block ends while another reads its memory
}
HOST_ENTRY(sample_kernel)
