// FP4 experts, few tokens an expert: see kernels/fp4_moe.py for layout and arithmetic, and
// kernels/fp4_moe_cuda.py for the launch. A block streams the codes of RG * 16 weight rows of one
// expert through a ring of STAGES buffers and multiplies them by up to TOKENS tokens; weight rows are
// the rows of the matrix instruction, tokens its columns.
//
// Warps: RG row groups x KG shares of the channels; the shares are added in order.
// Build with K, N (of this projection), GROUP, RG, KG, KB (pairs of groups a stage), STAGES, TOKENS,
// SLICES (row slices a block takes one after another), TOP_K, OUT, SHARED (-1: none).
#include "device.cuh"

constexpr int NVFP4 = GROUP == 16;
constexpr int THREADS = RG * KG * 32, ROWS = RG * 16, PAIR = 2 * GROUP, CHANNELS = KB * PAIR;
constexpr int K_STEPS = K / CHANNELS, STEPS = K_STEPS * SLICES, TILES = TOKENS / 8;
constexpr int WORDS = GROUP / 16;               // 32-bit words of codes a lane takes of a row and pair
constexpr int X_STRIDE = CHANNELS * 2 + GROUP * 2;  // bytes; the padding spreads rows over the banks
constexpr int CODE_BYTES = KB * ROWS * GROUP, SCALE_BYTES = KB * 2 * ROWS;
constexpr int STAGE = CODE_BYTES + SCALE_BYTES + TOKENS * X_STRIDE;
constexpr int RED_STRIDE = TOKENS + 1, RED_BYTES = KG * ROWS * RED_STRIDE * 4;
constexpr int RED = STAGES * STAGE, IDS = RED + (RED_BYTES + 15) / 16 * 16;
static_assert(K % CHANNELS == 0 && KB % KG == 0 && TOKENS % 8 == 0 && STAGES >= 2, "shape");

// Four bytes of codes -> their low elements (two pairs) and high elements as fp16 / 2^14.
DEVICE void decode(u32 word, u32* low, u32* high) {
  const u32 s = permute_bytes(word, 0, 0x1404), t = permute_bytes(word, 0, 0x3424);
  low[0] = s & 0x8E008E00u;
  low[1] = t & 0x8E008E00u;
  high[0] = ((s >> 2) & 0x0C000C00u) | ((s << 1) & 0x82008200u);
  high[1] = ((t >> 2) & 0x0C000C00u) | ((t << 1) & 0x82008200u);
}
// A group's scale byte as two equal fp16: an exponent field, or e4m3 times 2^7.
DEVICE u32 scale_pair(u32 byte) {
  if (NVFP4) return mul_f16x2(e4m3x2_to_f16x2((u16)(byte * 0x0101u)), 0x58005800u);
  return byte * 0x04000400u;
}

template <bool UP> DEVICE int weight_row(int block, int slice, int row) {
  if (UP) return (row < ROWS / 2 ? 0 : N / 2 - ROWS / 2) + block * (ROWS / 2) + row;
  return (block * SLICES + slice) * ROWS + row;
}

template <bool UP> struct Work {
  const u8 *codes, *scales, *x;
  u8* shared;
  const int* source_rows;  // shared memory: row of x of each token of the tile
  int count, thread;

  DEVICE void load_weights(int step) const {
    const int slice = step / K_STEPS, pair0 = (step % K_STEPS) * KB;
    u8* stage = shared + (step % STAGES) * STAGE;
    constexpr int PARTS = GROUP / 16, RUN = ROWS * PARTS;
    constexpr int CODES = KB * RUN, SCALES = KB * 2 * RG;
    UNROLL for (int i = 0; i < (CODES + THREADS - 1) / THREADS; i++) {
      const int c = i * THREADS + thread;
      if (CODES % THREADS && c >= CODES) continue;
      const int pair = c / RUN, row = c % RUN / PARTS, part = c % PARTS;
      const i64 at = (i64)(pair0 + pair) * (N * GROUP) +
                     weight_row<UP>(block_x(), slice, row) * GROUP + part * 16;
      copy16_async(stage + c * 16, codes + at);
    }
    UNROLL for (int i = 0; i < (SCALES + THREADS - 1) / THREADS; i++) {
      const int c = i * THREADS + thread;
      if (SCALES % THREADS && c >= SCALES) continue;
      const int group = c / RG, row = c % RG * 16;
      const i64 at = (i64)(pair0 * 2 + group) * N + weight_row<UP>(block_x(), slice, row);
      copy16_async(stage + CODE_BYTES + c * 16, scales + at);
    }
  }
  DEVICE void load_tokens(int step) const {
    const int first = (step % K_STEPS) * CHANNELS;
    u8* stage = shared + (step % STAGES) * STAGE + CODE_BYTES + SCALE_BYTES;
    constexpr int PARTS = CHANNELS / 8;
    for (int c = thread; c < count * PARTS; c += THREADS) {
      const int token = c / PARTS, part = c % PARTS;
      const i64 at = ((i64)source_rows[token] * K + first + part * 8) * 2;
      copy16_async(stage + token * X_STRIDE + part * 16, x + at);
    }
  }
  // Products of one stage, added to acc: [tile of 8 tokens][4].
  DEVICE void multiply(int step, float (*acc)[4]) const {
    const u8* stage = shared + (step % STAGES) * STAGE;
    const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int row = warp % RG * 16 + g, share = warp / RG;
    const u8* tokens = stage + CODE_BYTES + SCALE_BYTES;
    UNROLL for (int i = 0; i < KB / KG; i++) {
      const int pair = i * KG + share;
      const u8* code = stage + (pair * ROWS + row) * GROUP + t * (GROUP / 4);
      const u8* scale = stage + CODE_BYTES + pair * 2 * ROWS + row;
      const u32 low_a = scale_pair(scale[0]), low_b = scale_pair(scale[8]);
      const u32 high_a = scale_pair(scale[ROWS]), high_b = scale_pair(scale[ROWS + 8]);
      u32 word_a[WORDS], word_b[WORDS];
      if (WORDS == 2) {
        const Vec2 a = *(const Vec2*)code, b = *(const Vec2*)(code + 8 * GROUP);
        word_a[0] = a.x, word_a[WORDS - 1] = a.y, word_b[0] = b.x, word_b[WORDS - 1] = b.y;
      } else {
        word_a[0] = *(const u32*)code, word_b[0] = *(const u32*)(code + 8 * GROUP);
      }
      UNROLL for (int w = 0; w < WORDS; w++) {
        u32 la[2], ha[2], lb[2], hb[2];
        decode(word_a[w], la, ha);
        decode(word_b[w], lb, hb);
        const u32 low[4] = {mul_f16x2(la[0], low_a), mul_f16x2(lb[0], low_b),
                            mul_f16x2(la[1], low_a), mul_f16x2(lb[1], low_b)};
        const u32 high[4] = {mul_f16x2(ha[0], high_a), mul_f16x2(hb[0], high_b),
                             mul_f16x2(ha[1], high_a), mul_f16x2(hb[1], high_b)};
        UNROLL for (int n = 0; n < TILES; n++) {
          const u8* p = tokens + (n * 8 + g) * X_STRIDE + (pair * PAIR + t * (GROUP / 4) + w * 4) * 2;
          const Vec2 x_low = *(const Vec2*)p, x_high = *(const Vec2*)(p + GROUP * 2);
          mma_f16(acc[n], low, x_low.x, x_low.y);
          mma_f16(acc[n], high, x_high.x, x_high.y);
        }
      }
    }
  }
  // Partial results of all warps into shared memory, [share][row][token].
  DEVICE void keep(const float (*acc)[4]) const {
    const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    float* red = (float*)(shared + RED) + (warp / RG * ROWS + warp % RG * 16 + g) * RED_STRIDE;
    UNROLL for (int n = 0; n < TILES; n++) {
      UNROLL for (int i = 0; i < 4; i++)
        red[(i / 2) * 8 * RED_STRIDE + n * 8 + t * 2 + i % 2] = acc[n][i];
    }
  }
  DEVICE float total(int row, int token) const {
    const float* red = (const float*)(shared + RED) + row * RED_STRIDE + token;
    float sum = red[0];
    UNROLL for (int s = 1; s < KG; s++) sum += red[s * ROWS * RED_STRIDE];
    return sum;
  }
};

DEVICE void clear(float (*acc)[4]) {
  UNROLL for (int n = 0; n < TILES; n++) {
    UNROLL for (int i = 0; i < 4; i++) acc[n][i] = 0.0f;
  }
}

KERNEL(THREADS, 1)
gate_up_kernel(const u8* x, const u8* codes, const u8* scales, const float* rows, u16* hidden,
               const int* pairs, const int* tile_expert, const int* tile_start,
               const int* tile_count, const int* num_tiles, float limit) {
  SHARED_BYTES(shared);
  await_previous();
  let_next_start();  // not sooner: the next launch looks at the work list before it waits for this one
  const int tile = block_y(), thread = thread_id();
  if (tile >= num_tiles[0]) return;
  const i64 expert = tile_expert[tile];
  const int start = tile_start[tile], count = tile_count[tile];
  int* ids = (int*)(shared + IDS);
  if (thread < count) ids[thread] = pairs[start + thread] / TOP_K;
  sync_block();
  const Work<true> work = {codes + expert * ((i64)N * K / 2), scales + expert * ((i64)N * K / GROUP),
                           x, shared, ids, count, thread};
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < STEPS) work.load_weights(s), work.load_tokens(s);
    copies_commit();
  }
  float acc[TILES][4];
  clear(acc);
  for (int s = 0; s < STEPS; s++) {
    copies_wait<STAGES - 2>();
    sync_block();
    const int ahead = s + STAGES - 1;
    if (ahead < STEPS) work.load_weights(ahead), work.load_tokens(ahead);
    copies_commit();
    work.multiply(s, acc);
  }
  work.keep(acc);
  sync_block();
  const float* factors = rows + expert * N;
  const int first = block_x() * (ROWS / 2);
  for (int i = thread; i < ROWS / 2 * count; i += THREADS) {
    const int row = i % (ROWS / 2), token = i / (ROWS / 2), n = first + row;
    const float gate = minimum(work.total(row, token) * factors[n], limit);
    const float up = work.total(ROWS / 2 + row, token) * factors[N / 2 + n];
    const float g = gate * minimum(maximum(up, -limit), limit) / (1.0f + exp_(-gate));
    hidden[(i64)(start + token) * (N / 2) + n] = (u16)pack_f16x2(g, g);
  }
}
HOST_ENTRY(gate_up_kernel)

// counters int32 [tokens, grid x]: zero before and after. shared_out: added after the experts.
KERNEL(THREADS, 1)
down_kernel(const u8* hidden, const u8* codes, const u8* scales, const float* rows,
            const float* weights, float* partial, const int* pairs, const int* tile_expert,
            const int* tile_start, const int* tile_count, const int* num_tiles, int* counters,
            const void* shared_out, void* out) {
  SHARED_BYTES(shared);
  let_next_start();
  const int tile = block_y(), thread = thread_id();
  if (tile >= num_tiles[0]) return;
  const i64 expert = tile_expert[tile];
  const int start = tile_start[tile], count = tile_count[tile];
  int *ids = (int*)(shared + IDS), *pair_of = ids + TOKENS, *is_last = pair_of + TOKENS;
  if (thread < count) ids[thread] = start + thread, pair_of[thread] = pairs[start + thread];
  sync_block();
  const Work<false> work = {codes + expert * ((i64)N * K / 2), scales + expert * ((i64)N * K / GROUP),
                            hidden, shared, ids, count, thread};
  for (int s = 0; s < STAGES - 1 && s < STEPS; s++) work.load_weights(s);
  await_previous();  // weights do not depend on it, hidden does
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < STEPS) work.load_tokens(s);
    copies_commit();
  }
  float acc[TILES][4];
  clear(acc);
  for (int s = 0; s < STEPS; s++) {
    copies_wait<STAGES - 2>();
    sync_block();
    const int ahead = s + STAGES - 1;
    if (ahead < STEPS) work.load_weights(ahead), work.load_tokens(ahead);
    copies_commit();
    work.multiply(s, acc);
    if (s % K_STEPS != K_STEPS - 1) continue;
    work.keep(acc);
    clear(acc);
    sync_block();
    const int first = (block_x() * SLICES + s / K_STEPS) * ROWS;
    for (int i = thread; i < ROWS * count; i += THREADS) {
      const int row = i % ROWS, token = i / ROWS, pair = pair_of[token];
      partial[(i64)pair * N + first + row] =
          work.total(row, token) * rows[expert * N + first + row] * weights[pair];
    }
  }
  // The block that brings a token's last expert adds them up, in the order of the token's list.
  fence_device();
  sync_block();
  if (thread < count) {
    int* counter = counters + (i64)(pair_of[thread] / TOP_K) * grid_x() + block_x();
    is_last[thread] = add_acq_rel(counter, 1) == TOP_K - 1;
    if (is_last[thread]) *counter = 0;
  }
  sync_block();
  constexpr int WIDTH = ROWS * SLICES / 4;
  for (int i = thread; i < WIDTH * count; i += THREADS) {
    if (!is_last[i / WIDTH]) continue;
    const i64 token = pair_of[i / WIDTH] / TOP_K;
    const int n = block_x() * ROWS * SLICES + i % WIDTH * 4;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int choice = 0; choice < TOP_K; choice++) {
      float part[4];
      Element<0>::unpack(load16_volatile(partial + (token * TOP_K + choice) * N + n), part);
      UNROLL for (int j = 0; j < 4; j++) sum[j] += part[j];
    }
    UNROLL for (int j = 0; j < 4; j++) {
      if (SHARED >= 0) sum[j] += Element<SHARED < 0 ? 0 : SHARED>::load(shared_out, token * N + n + j);
      Element<OUT>::store(out, token * N + n + j, sum[j]);
    }
  }
}
HOST_ENTRY(down_kernel)
