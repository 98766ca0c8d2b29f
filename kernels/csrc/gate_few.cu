// Router of few tokens in one launch with one exchange: see kernels/gate.py for the rules.
//
// One cluster of E / 16 blocks; each block has 16 experts and all channels, its weights in registers
// before it waits for the tokens, so its logits are whole. They go into the first block's shared
// memory; that block chooses, a warp a token, and makes the experts' work list without leaving it.
//
// Build with D, E, TOP_K, TOKENS (8, 16, 32: room for tokens), HASHED, IDS64, TABLE64, LIST.
#include "device.cuh"

constexpr int CLUSTER = E / 16, THREADS = 512, WARPS = 16, TILES = TOKENS / 8, EACH = E / 32;
constexpr int STEPS = D / 32 / WARPS, BATCH = TILES == 1 || STEPS < 4 ? STEPS : 4;  // of 32 channels
constexpr int ROUNDS = (TOKENS + WARPS - 1) / WARPS, WORDS = (TOKENS * TOP_K + 31) / 32;
constexpr int S_STRIDE = 17, LOGITS_AT = WARPS * TOKENS * S_STRIDE * 4, BIAS_AT = LOGITS_AT + TOKENS * E * 4;
constexpr int CHOSEN_AT = BIAS_AT + E * 4, TOTALS_AT = CHOSEN_AT + WORDS * 32 * 4;
static_assert(D % (32 * WARPS) == 0 && STEPS % BATCH == 0 && E % 32 == 0 && E <= THREADS, "shape");

DEVICE u32 ordered(float x) {
  const u32 bits = as_bits(x + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

KERNEL(THREADS, 1)
route_few_kernel(const u8* x, const u8* weight, const float* bias, const void* table,
                 const void* token_ids, int* experts, float* weights, int* pairs, int* tile_expert,
                 int* tile_start, int* tile_count, int* num_tiles, int tokens, int tile,
                 float routed_scale) {
  SHARED_BYTES(shared);
  let_next_start();
  const int thread = thread_id(), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int rank = cluster_rank(), channel = warp * STEPS * 32 + t * 8;
  float* logits = (float*)(shared + LOGITS_AT);  // [token][expert], of the first block alone
  float* biases = (float*)(shared + BIAS_AT);
  int* chosen = (int*)(shared + CHOSEN_AT);
  if (CLUSTER > 1) cluster_arrive();
  // Eight channels of two experts a lane and step; the order of channels within a product is free.
  Vec4 low[STEPS], high[STEPS];
  UNROLL for (int s = 0; s < STEPS; s++) {
    const u8* at = weight + ((i64)(rank * 16 + g) * D + channel + s * 32) * 2;
    low[s] = load16(at), high[s] = load16(at + (i64)8 * D * 2);
  }
  if (!HASHED && rank == 0 && thread < E) biases[thread] = bias[thread];
  if (thread < WORDS * 32) chosen[thread] = -1;
  await_previous();  // weights do not depend on it, tokens do

  int from_table[ROUNDS];
  UNROLL for (int r = 0; r < ROUNDS; r++) {
    const int token = r * WARPS + warp;
    from_table[r] = 0;
    if (!HASHED || rank != 0 || token >= tokens || lane >= TOP_K) continue;
    const i64 id = IDS64 ? ((const i64*)token_ids)[token] : ((const int*)token_ids)[token];
    const i64 at = id * TOP_K + lane;
    from_table[r] = TABLE64 ? (int)((const i64*)table)[at] : ((const int*)table)[at];
  }
  float* sums = (float*)shared;  // [warp][token][expert]
  UNROLL for (int n = 0; n < TILES; n++) {
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const u8* row = x + ((i64)min_(n * 8 + g, tokens - 1) * D + channel) * 2;  // extra rows are not read
    UNROLL for (int begin = 0; begin < STEPS; begin += BATCH) {
      Vec4 v[BATCH];
      UNROLL for (int s = 0; s < BATCH; s++) v[s] = load16(row + (begin + s) * 64);
      UNROLL for (int s = 0; s < BATCH; s++) {
        const Vec4 a = low[begin + s], b = high[begin + s];
        const u32 first[4] = {a.x, b.x, a.y, b.y}, second[4] = {a.z, b.z, a.w, b.w};
        mma_bf16(acc, first, v[s].x, v[s].y);
        mma_bf16(acc, second, v[s].z, v[s].w);
      }
    }
    UNROLL for (int i = 0; i < 4; i++)
      sums[(warp * TOKENS + n * 8 + t * 2 + i % 2) * S_STRIDE + g + i / 2 * 8] = acc[i];
  }
  sync_block();
  if (CLUSTER > 1) cluster_wait();  // all blocks are there
  for (int i = thread; i < tokens * 16; i += THREADS) {
    float sum = 0.0f;
    UNROLL for (int w = 0; w < WARPS; w++) sum += sums[(w * TOKENS + i / 16) * S_STRIDE + i % 16];
    float* place = logits + i / 16 * E + rank * 16 + i % 16;
    if (CLUSTER > 1) peer_store(place, 0, sum);
    else *place = sum;
  }
  if (CLUSTER > 1) sync_cluster();
  else sync_block();
  if (rank != 0) return;

  UNROLL for (int r = 0; r < ROUNDS; r++) {
    const int token = r * WARPS + warp;
    if (token >= tokens) continue;
    float score[EACH];
    u32 key[EACH];
    UNROLL for (int i = 0; i < EACH; i++) {
      const int e = lane + 32 * i;
      const float v = logits[token * E + e];
      // softplus by log1p with Goldberg's correction
      const float u = exp_(v < 0.0f ? v : -v), one = 1.0f + u;
      const float log1p = one == 1.0f ? u : log_(one) * (u / (one - 1.0f));
      score[i] = sqrt_(maximum(v, 0.0f) + log1p);
      key[i] = HASHED ? 0 : ordered(score[i] + biases[e]);
    }
    float value[TOP_K], total = 0.0f;
    int best[TOP_K];
    UNROLL for (int c = 0; c < TOP_K; c++) {
      if (HASHED) {
        best[c] = lane_of(from_table[r], c);
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
      chosen[token * TOP_K + c] = best[c];
      experts[token * TOP_K + c] = best[c];
      weights[token * TOP_K + c] = value[c] / total * routed_scale;
    }
  }
  if (!LIST) return;
  sync_block();
  // A thread an expert: which pairs are its own, and how many pairs and tiles come before them.
  const int e = thread;
  u32 mask[WORDS];
  int count = 0;
  UNROLL for (int w = 0; w < WORDS; w++) {
    mask[w] = 0;
    UNROLL for (int q = 0; q < 8; q++) {
      const Vec4 four = *(const Vec4*)(chosen + w * 32 + q * 4);
      mask[w] |= ((int)four.x == e ? 1u : 0u) << (q * 4) | ((int)four.y == e ? 2u : 0u) << (q * 4) |
                 ((int)four.z == e ? 4u : 0u) << (q * 4) | ((int)four.w == e ? 8u : 0u) << (q * 4);
    }
    count += count_bits(mask[w]);
  }
  const int tiles = (count + tile - 1) / tile, own = count | tiles << 16;
  int before = own;  // both at once: neither passes 2^16
  UNROLL for (int by = 1; by < 32; by *= 2) {
    const int other = lane_up(before, by);
    if (lane >= by) before += other;
  }
  int* totals = (int*)(shared + TOTALS_AT);
  if (lane == 31) totals[warp] = before;
  sync_block();
  before -= own;
  for (int w = 0; w < warp; w++) before += totals[w];
  if (e == E - 1) num_tiles[0] = (before + own) >> 16;
  if (e >= E || count == 0) return;
  const int start = before & 0xFFFF, first_tile = before >> 16;
  for (int n = 0; n < tiles; n++) {
    tile_expert[first_tile + n] = e;
    tile_start[first_tile + n] = start + n * tile;
    tile_count[first_tile + n] = min_(count - n * tile, tile);
  }
  int place = start;
  UNROLL for (int w = 0; w < WORDS; w++) {
    for (u32 bits = mask[w]; bits; bits &= bits - 1)
      pairs[place++] = w * 32 + count_bits((bits & (0u - bits)) - 1);
  }
}
HOST_ENTRY(route_few_kernel)
