// Router of few tokens in one launch: logits, choice, weights and the experts' work list. See
// kernels/gate.py for the rules.
//
// A cluster of 8 blocks takes 16 experts, each block an eighth of the channels; sums go through each
// other's shared memory in rank order, then to memory. The cluster that finishes last chooses for all
// tokens, a warp a token, and its first block makes the list.
//
// Build with D, E, TOP_K, TOKENS (8, 16, 32, 64: room for tokens), HASHED, IDS64, TABLE64, LIST.
#include "device.cuh"

constexpr int CLUSTER = 8, THREADS = 128, WARPS = 4, SHARE = D / CLUSTER, TILES = TOKENS / 8;
constexpr int STRIDE = SHARE * 2 + 16, STEPS = SHARE / 16 / WARPS, EACH = E / 32;
constexpr int X_AT = 16 * STRIDE, SUMS_AT = X_AT + TOKENS * STRIDE, S_STRIDE = 17;
constexpr int STATE_AT = SUMS_AT + (WARPS + 1) * TOKENS * S_STRIDE * 4;
constexpr int CHUNKS = (TOKENS * TOP_K + 31) / 32;  // of 32 pairs
constexpr int CHUNK_AT = 0, STARTS_AT = CHUNKS * E * 2;  // where operands were
static_assert(SHARE % (16 * WARPS) == 0 && E % THREADS == 0, "shape");
static_assert(STARTS_AT + E * 4 + 64 <= SUMS_AT, "the list's room");

DEVICE u32 ordered(float x) {
  const u32 bits = as_bits(x + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

KERNEL(THREADS, 1)
route_kernel(const u8* x, const u8* weight, const float* bias, const void* table,
             const void* token_ids, float* logits, int* counter, int* experts, float* weights,
             int* pairs, int* tile_expert, int* tile_start, int* tile_count, int* num_tiles,
             int tokens, int tile, float routed_scale) {
  SHARED_BYTES(shared);
  let_next_start();
  const int thread = thread_id(), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int rank = cluster_rank(), first = block_y() * 16;
  constexpr int PARTS = SHARE / 8;
  for (int c = thread; c < 16 * PARTS; c += THREADS)
    copy16_async(shared + c / PARTS * STRIDE + c % PARTS * 16,
                 weight + ((i64)(first + c / PARTS) * D + rank * SHARE + c % PARTS * 8) * 2);
  await_previous();  // weights do not depend on it, tokens do
  for (int c = thread; c < TOKENS * PARTS; c += THREADS) {
    const int token = c / PARTS;
    copy16_async(shared + X_AT + token * STRIDE + c % PARTS * 16,
                 x + ((i64)token * D + rank * SHARE + c % PARTS * 8) * 2, token < tokens);
  }
  copies_commit();
  copies_wait<0>();
  sync_block();
  float acc[TILES][4];
  UNROLL for (int n = 0; n < TILES; n++) {
    UNROLL for (int i = 0; i < 4; i++) acc[n][i] = 0.0f;
  }
  UNROLL for (int s = 0; s < STEPS; s++) {
    const int at = (warp * STEPS + s) * 32;  // bytes
    u32 a[4];
    load_matrices(a, shared + lane % 16 * STRIDE + at + lane / 16 * 16);
    UNROLL for (int n = 0; n < TILES; n++) {
      const u8* p = shared + X_AT + (n * 8 + g) * STRIDE + at + t * 4;
      mma_bf16(acc[n], a, *(const u32*)p, *(const u32*)(p + 16));
    }
  }
  float* sums = (float*)(shared + SUMS_AT);  // [warp][token][expert]; the block's own sum comes last
  UNROLL for (int n = 0; n < TILES; n++) {
    UNROLL for (int i = 0; i < 4; i++)
      sums[(warp * TOKENS + n * 8 + t * 2 + i % 2) * S_STRIDE + g + i / 2 * 8] = acc[n][i];
  }
  sync_block();
  float* own = sums + WARPS * TOKENS * S_STRIDE;
  for (int i = thread; i < TOKENS * 16; i += THREADS) {
    const int at = i / 16 * S_STRIDE + i % 16;
    float sum = sums[at];
    UNROLL for (int w = 1; w < WARPS; w++) sum += sums[w * TOKENS * S_STRIDE + at];
    own[at] = sum;
  }
  sync_cluster();
  for (int i = thread * CLUSTER + rank; i < tokens * 16; i += THREADS * CLUSTER) {
    float sum = 0.0f;
    UNROLL for (int s = 0; s < CLUSTER; s++) sum += peer_load(own + i / 16 * S_STRIDE + i % 16, s);
    logits[(i64)(i / 16) * E + first + i % 16] = sum;
  }
  fence_device();
  sync_cluster();
  int* state = (int*)(shared + STATE_AT);
  if (rank == 0 && thread == 0) {
    const int clusters = E / 16;
    state[0] = add_acq_rel(counter, 1) == clusters - 1;
    if (state[0]) *counter = 0;
    fence_device();
  }
  sync_cluster();
  const bool is_last = as_bits(peer_load((const float*)state, 0)) != 0;
  sync_cluster();  // nobody leaves while its memory is read
  if (!is_last) return;

  for (int token = rank * WARPS + warp; token < tokens; token += CLUSTER * WARPS) {
    float score[EACH];
    u32 key[EACH];
    UNROLL for (int i = 0; i < EACH; i++) {
      const int e = lane + 32 * i;
      const float v = load_volatile(logits + (i64)token * E + e);
      // softplus by log1p with Goldberg's correction
      const float u = exp_(v < 0.0f ? v : -v), one = 1.0f + u;
      const float log1p = one == 1.0f ? u : log_(one) * (u / (one - 1.0f));
      score[i] = sqrt_(maximum(v, 0.0f) + log1p);
      key[i] = HASHED ? 0 : ordered(score[i] + bias[e]);
    }
    float value[TOP_K], total = 0.0f;
    int best[TOP_K];
    UNROLL for (int c = 0; c < TOP_K; c++) {
      if (HASHED) {
        const i64 id = IDS64 ? ((const i64*)token_ids)[token] : ((const int*)token_ids)[token];
        const i64 at = id * TOP_K + c;
        best[c] = TABLE64 ? (int)((const i64*)table)[at] : ((const int*)table)[at];
      } else {
        u32 most = 0;
        UNROLL for (int i = 0; i < EACH; i++) most = key[i] > most ? key[i] : most;
        most = lane_max(most);
        u32 lowest = 0xFFFFFFFFu;
        UNROLL for (int i = EACH - 1; i >= 0; i--) lowest = key[i] == most ? lane + 32 * i : lowest;
        best[c] = (int)lane_min(lowest);
        UNROLL for (int i = 0; i < EACH; i++)
          if (best[c] == lane + 32 * i) key[i] = 0;
      }
      float mine = 0.0f;
      UNROLL for (int i = 0; i < EACH; i++) mine = best[c] == lane + 32 * i ? score[i] : mine;
      value[c] = as_float((u32)lane_of((int)as_bits(mine), best[c] % 32));
      total += value[c];
    }
    UNROLL for (int c = 0; c < TOP_K; c++) {
      if (lane != c) continue;
      experts[token * TOP_K + c] = best[c];
      weights[token * TOP_K + c] = value[c] / total * routed_scale;
    }
  }
  if (!LIST) return;
  fence_device();
  sync_cluster();
  if (rank != 0) return;
  const int num_pairs = tokens * TOP_K, chunks = (num_pairs + 31) / 32;
  u16* counts = (u16*)(shared + CHUNK_AT);  // [chunk][expert]: first how many, then how many before
  int* starts = (int*)(shared + STARTS_AT);
  for (int i = thread; i < chunks * E; i += THREADS) counts[i] = 0;
  sync_block();
  for (int c = warp; c < chunks; c += WARPS) {
    const int p = c * 32 + lane, e = p < num_pairs ? load_volatile(experts + p) : -1;
    const u32 same = lanes_with(e);
    if (e >= 0 && (same & ((1u << lane) - 1)) == 0) counts[c * E + e] = (u16)count_bits(same);
  }
  sync_block();
  constexpr int PER = E / THREADS;
  int mine[PER], tiles[PER], all = 0, all_tiles = 0;
  UNROLL for (int i = 0; i < PER; i++) {
    const int e = thread * PER + i;
    int sum = 0;
    for (int c = 0; c < chunks; c++) {
      const int here = counts[c * E + e];
      counts[c * E + e] = (u16)sum;
      sum += here;
    }
    mine[i] = sum, tiles[i] = (sum + tile - 1) / tile;
    all += sum, all_tiles += tiles[i];
  }
  int before = all, tiles_before = all_tiles;
  UNROLL for (int by = 1; by < 32; by *= 2) {
    const int a = lane_up(before, by), b = lane_up(tiles_before, by);
    if (lane >= by) before += a, tiles_before += b;
  }
  int* by_warp = starts + E;
  if (lane == 31) by_warp[warp] = before, by_warp[WARPS + warp] = tiles_before;
  sync_block();
  before -= all, tiles_before -= all_tiles;
  for (int w = 0; w < warp; w++) before += by_warp[w], tiles_before += by_warp[WARPS + w];
  if (thread == THREADS - 1) num_tiles[0] = tiles_before + all_tiles;
  UNROLL for (int i = 0; i < PER; i++) {
    starts[thread * PER + i] = before;
    for (int n = 0; n < tiles[i]; n++) {
      tile_expert[tiles_before + n] = thread * PER + i;
      tile_start[tiles_before + n] = before + n * tile;
      tile_count[tiles_before + n] = min_(mine[i] - n * tile, tile);
    }
    before += mine[i], tiles_before += tiles[i];
  }
  sync_block();
  for (int c = warp; c < chunks; c += WARPS) {
    const int p = c * 32 + lane, e = p < num_pairs ? load_volatile(experts + p) : -1;
    const u32 same = lanes_with(e);
    if (e >= 0) pairs[starts[e] + counts[c * E + e] + count_bits(same & ((1u << lane) - 1))] = p;
  }
}
HOST_ENTRY(route_kernel)
