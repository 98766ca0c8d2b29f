// The TOP largest logits of every row, as entry numbers in ascending order; equal logits: the lower
// entry wins. See kernels/indexer.py for the plan and the buffer of logits.
//
// A cluster of CLUSTER blocks has one row, each block a contiguous share. Range, then a histogram of
// BINS equal steps of it (float arithmetic keeps their order), then the few entries of the bin that
// holds the last place are ranked among each other: that gives the exact cutoff (value, entry). Rows
// with too many entries in that bin find the cutoff by bisection instead.
//
// Build with TOP, CLUSTER, THREADS.
#include "device.cuh"

constexpr int BINS = 2048, LIST = 1024, WARPS = THREADS / 32;
constexpr int HIST_AT = 0, TOTAL_AT = BINS * 4, KEYS_AT = 2 * BINS * 4, ENTRIES_AT = KEYS_AT + LIST * 4;
constexpr int WARP_AT = ENTRIES_AT + LIST * 4, STATE_AT = WARP_AT + 4 * WARPS * 4;
static_assert(BINS % THREADS == 0 && LIST <= BINS, "bins");
enum { LOW, HIGH, LISTED, CUT_FOUND, CUT_KEY, CUT_ENTRY, CHOSEN, BIN, ABOVE, COUNT, STATES = 16 };

DEVICE u32 ordered(float x) {
  const u32 bits = as_bits(x + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
// Rises with x; entries of -inf are left out of the range and fall into the first bin.
DEVICE int bin_of(float x, float low, float step) {
  return x > low ? max_(0, min_(BINS - 1, (int)((x - low) * step))) : 0;
}
DEVICE int peer_int(const int* p, int rank) {
  return CLUSTER > 1 ? (int)as_bits(peer_load((const float*)p, rank)) : *p;
}
DEVICE float peer_float(const float* p, int rank) { return CLUSTER > 1 ? peer_load(p, rank) : *p; }
DEVICE void meet() {
  if (CLUSTER > 1) sync_cluster();
  else sync_block();
}
// Sum over the block; every thread gets it.
DEVICE int block_sum(int v, int* warp_sums, int thread) {
  UNROLL for (int mask = 16; mask; mask /= 2) v += lane_xor(v, mask);
  sync_block();
  if (thread % 32 == 0) warp_sums[thread / 32] = v;
  sync_block();
  int sum = 0;
  UNROLL for (int w = 0; w < WARPS; w++) sum += warp_sums[w];
  return sum;
}
// Sum over the threads before this one.
DEVICE int block_before(int v, int* warp_sums, int thread) {
  int inclusive = v;
  UNROLL for (int by = 1; by < 32; by *= 2) {
    const int other = lane_up(inclusive, by);
    if (thread % 32 >= by) inclusive += other;
  }
  sync_block();
  if (thread % 32 == 31) warp_sums[thread / 32] = inclusive;
  sync_block();
  int sum = 0;
  UNROLL for (int w = 0; w < WARPS; w++) sum += w < thread / 32 ? warp_sums[w] : 0;
  return sum + inclusive - v;
}
DEVICE int cluster_sum(int v, int* warp_sums, int* state, int thread) {
  const int sum = block_sum(v, warp_sums, thread);
  if (thread == 0) state[COUNT] = sum;
  meet();
  int total = 0;
  UNROLL for (int s = 0; s < CLUSTER; s++) total += peer_int(state + COUNT, s);
  meet();
  return total;
}

KERNEL(THREADS, 1)
select_kernel(const float* logits, const int* entries, const i64* row_start, int* selected,
              int* selected_count) {
  SHARED_BYTES(shared);
  let_next_start();
  await_previous();
  int *hist = (int*)(shared + HIST_AT), *total = (int*)(shared + TOTAL_AT);
  u32* list_keys = (u32*)(shared + KEYS_AT);
  int* list_entries = (int*)(shared + ENTRIES_AT);
  int* warp_ints = (int*)(shared + WARP_AT);
  float* warp_floats = (float*)(shared + WARP_AT) + 2 * WARPS;
  int* state = (int*)(shared + STATE_AT);
  float* state_float = (float*)(shared + STATE_AT);
  const int thread = thread_id(), rank = CLUSTER > 1 ? cluster_rank() : 0, row = block_y();
  const int n = entries[row];
  int* result = selected + (i64)row * TOP;
  if (rank == 0 && thread == 0) selected_count[row] = min_(n, TOP);
  if (n <= TOP) {
    if (rank == 0)
      for (int i = thread; i < TOP; i += THREADS) result[i] = i < n ? i : -1;
    return;
  }
  const float* values = logits + row_start[row];
  // shares in units of four entries, so that loads are of 16 bytes (rows begin at multiples of them)
  const int block_share = (n + CLUSTER * 4 - 1) / (CLUSTER * 4) * 4;
  const int share = (block_share + THREADS * 4 - 1) / (THREADS * 4) * 4;
  const int block_end = min_(n, (rank + 1) * block_share);
  const int begin = min_(rank * block_share + thread * share, block_end);
  const int end = min_(begin + share, block_end);

  for (int i = thread; i < BINS; i += THREADS) hist[i] = 0;
  if (thread < STATES) state[thread] = 0;
  float low = infinity(), high = -infinity();
  for (int i = begin; i < end; i += 4) {
    float v[4];
    Element<0>::unpack(load16(values + i), v);
    UNROLL for (int j = 0; j < 4; j++)
      if (i + j < end && v[j] > -infinity()) low = minimum(low, v[j]), high = maximum(high, v[j]);
  }
  UNROLL for (int mask = 16; mask; mask /= 2) {
    low = minimum(low, lane_xor(low, mask));
    high = maximum(high, lane_xor(high, mask));
  }
  if (thread % 32 == 0) warp_floats[thread / 32] = low, warp_floats[WARPS + thread / 32] = high;
  sync_block();
  if (thread == 0) {
    for (int w = 1; w < WARPS; w++) {
      low = minimum(low, warp_floats[w]);
      high = maximum(high, warp_floats[WARPS + w]);
    }
    state_float[LOW] = low, state_float[HIGH] = high;
  }
  meet();
  low = infinity(), high = -infinity();
  UNROLL for (int s = 0; s < CLUSTER; s++) {
    low = minimum(low, peer_float(state_float + LOW, s));
    high = maximum(high, peer_float(state_float + HIGH, s));
  }
  const float step = high > low ? BINS / (high - low) : 0.0f;

  for (int i = begin; i < end; i += 4) {
    float v[4];
    Element<0>::unpack(load16(values + i), v);
    UNROLL for (int j = 0; j < 4; j++)
      if (i + j < end) add_shared(hist + bin_of(v[j], low, step), 1);
  }
  meet();
  for (int i = thread; i < BINS; i += THREADS) {
    int sum = 0;
    UNROLL for (int s = 0; s < CLUSTER; s++) sum += peer_int(hist + i, s);
    total[i] = sum;
  }
  sync_block();
  {  // the bin that holds place TOP from above: threads take the bins from the top
    constexpr int EACH = BINS / THREADS;
    int mine = 0;
    UNROLL for (int i = 0; i < EACH; i++) {
      const int bin = BINS - 1 - (thread * EACH + i);
      mine += total[bin];
    }
    int above = block_before(mine, warp_ints, thread);
    UNROLL for (int i = 0; i < EACH; i++) {
      const int bin = BINS - 1 - (thread * EACH + i), here = total[bin];
      if (above < TOP && above + here >= TOP) state[BIN] = bin, state[ABOVE] = above;
      above += here;
    }
  }
  sync_block();
  const int last_bin = state[BIN], need = TOP - state[ABOVE];
  u32 cut_key = 0;
  int cut_entry = 0;
  if (total[last_bin] <= LIST) {
    for (int i = begin; i < end; i += 4) {
      float v[4];
      Element<0>::unpack(load16(values + i), v);
      UNROLL for (int j = 0; j < 4; j++) {
        if (i + j >= end || bin_of(v[j], low, step) != last_bin) continue;
        const int at = add_shared(state + LISTED, 1);
        list_keys[at] = ordered(v[j]), list_entries[at] = i + j;
      }
    }
    meet();
    // all blocks' lists, where the histograms were
    u32* all_keys = (u32*)hist;
    int *all_entries = total, all = 0, first = 0;
    for (int s = 0; s < CLUSTER; s++) {
      const int count = peer_int(state + LISTED, s);
      if (s == rank) first = all;
      for (int i = thread; i < count; i += THREADS) {
        all_keys[all + i] = (u32)peer_int((const int*)list_keys + i, s);
        all_entries[all + i] = peer_int(list_entries + i, s);
      }
      all += count;
    }
    sync_block();
    for (int i = thread; i < state[LISTED]; i += THREADS) {
      const u32 key = all_keys[first + i];
      const int entry = all_entries[first + i];
      int better = 0;
      for (int k = 0; k < all; k++)
        better += all_keys[k] > key || (all_keys[k] == key && all_entries[k] < entry);
      if (better == need - 1) state[CUT_KEY] = (int)key, state[CUT_ENTRY] = entry, state[CUT_FOUND] = 1;
    }
    meet();
    UNROLL for (int s = 0; s < CLUSTER; s++)
      if (peer_int(state + CUT_FOUND, s))
        cut_key = (u32)peer_int(state + CUT_KEY, s), cut_entry = peer_int(state + CUT_ENTRY, s);
  } else {
    for (int bit = 31; bit >= 0; bit--) {  // the greatest key that at least TOP keys reach
      const u32 test = cut_key | 1u << bit;
      int count = 0;
      for (int i = begin; i < end; i++) count += ordered(values[i]) >= test;
      if (cluster_sum(count, warp_ints, state, thread) >= TOP) cut_key = test;
    }
    int count = 0;
    for (int i = begin; i < end; i++) count += ordered(values[i]) > cut_key;
    const int places = TOP - cluster_sum(count, warp_ints, state, thread);
    int before = 0;  // entries below `before` with that key are fewer than the places
    for (int bit = 30; bit >= 0; bit--) {
      const int test = before + (1 << bit);
      if (test > n || test < 0) continue;
      count = 0;
      for (int i = begin; i < end; i++) count += i < test && ordered(values[i]) == cut_key;
      if (cluster_sum(count, warp_ints, state, thread) < places) before = test;
    }
    cut_entry = before;
  }

  int chosen = 0;
  for (int i = begin; i < end; i += 4) {
    float v[4];
    Element<0>::unpack(load16(values + i), v);
    UNROLL for (int j = 0; j < 4; j++) {
      const u32 key = ordered(v[j]);
      chosen += i + j < end && (key > cut_key || (key == cut_key && i + j <= cut_entry));
    }
  }
  int place = block_before(chosen, warp_ints, thread);
  if (thread == THREADS - 1) state[CHOSEN] = place + chosen;
  meet();
  for (int s = 0; s < rank; s++) place += peer_int(state + CHOSEN, s);
  for (int i = begin; i < end; i += 4) {
    float v[4];
    Element<0>::unpack(load16(values + i), v);
    UNROLL for (int j = 0; j < 4; j++) {
      const u32 key = ordered(v[j]);
      if (i + j < end && (key > cut_key || (key == cut_key && i + j <= cut_entry))) result[place++] = i + j;
    }
  }
  if (CLUSTER > 1) sync_cluster();  // no block ends while another reads its memory
}
HOST_ENTRY(select_kernel)
