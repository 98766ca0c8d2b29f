// FP8 block-scaled linear for 8 to 64 tokens on sm_90: see kernels/fp8_linear.py for the arithmetic.
//
// A block takes ROWS weight rows and KB scale blocks of 128 channels. Weights and e4m3 codes of the
// tokens lie in shared memory as the matrix unit reads them itself, so no thread converts a weight;
// four warps (a group) do 64 rows of one scale block at once, in fp32, and then apply both scales.
// The SPLITS blocks of a cluster cover K and add up through each other's shared memory, in rank order.
//
// Build with MODE (0: quantise x; 1: x holds e4m3 codes with factors), KB, SPLITS, ROWS (64, 128),
// TOKENS (8, 16, 32, 64), THREADS, IN, OUT.
#include "device.cuh"

constexpr int BLOCK = 128, SHARE = KB * BLOCK;
constexpr int ROW_GROUPS = ROWS / 64, K_GROUPS = THREADS / 128 / ROW_GROUPS;
constexpr int W_BYTES = ROWS * BLOCK, X_BYTES = TOKENS * BLOCK;  // of one scale block
constexpr int X_AT = KB * W_BYTES, FACTORS_AT = X_AT + KB * X_BYTES, ACC = TOKENS / 2;
constexpr int RED_STRIDE = ROWS + 4;  // floats
constexpr int VALUES = 16 / Element<IN>::BYTES;
constexpr int LANES = MODE == 1 ? 8 : 16;  // threads that bring 128 channels of a token
constexpr int ITEMS = TOKENS * KB * LANES / THREADS, MOST = MODE == 0 && VALUES == 4 ? 4 : 8;
constexpr int BATCH = ITEMS < MOST ? ITEMS : MOST;
static_assert(ITEMS >= 1 && ITEMS % BATCH == 0 && KB % K_GROUPS == 0, "shares of work");
static_assert((K_GROUPS > 1 ? K_GROUPS - 1 : 1) * TOKENS * RED_STRIDE * 4 <= FACTORS_AT,
              "sums take the place of the operands");

KERNEL(THREADS, (THREADS <= 256 && FACTORS_AT < 112 * 1024 ? 2 : 1))
linear_wide_kernel(const u8* x, const float* given_factors, const u8* weight, const u8* scale, void* out,
                   int tokens, i64 x_stride, int n, int k) {
  SHARED_TILES(shared);
  let_next_start();
  const int thread = thread_id(), group = thread / 128, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int split = block_x(), first_row = block_y() * ROWS, first_token = block_z() * TOKENS;
  UNROLL for (int b = 0; b < KB; b++) {
    UNROLL for (int i = 0; i < ROWS * 8 / THREADS; i++) {
      const int c = i * THREADS + thread, row = c / 8, chunk = c % 8;
      copy16_async(shared + b * W_BYTES + swizzled(row, chunk),
                   weight + (i64)(first_row + row) * k + split * SHARE + b * BLOCK + chunk * 16);
    }
    copies_commit();
  }
  float w_factor[KB];
  UNROLL for (int b = 0; b < KB; b++)
    w_factor[b] = as_float((u32)scale[(i64)(first_row / BLOCK) * (k / BLOCK) + split * KB + b] << 23);
  await_previous();  // weights do not depend on it, tokens do

  // Codes of the tokens beside the weights, all loads of a batch before any of them is used.
  float* factors = (float*)(shared + FACTORS_AT);
  UNROLL for (int start = 0; start < ITEMS; start += BATCH) {
    Vec4 raw[BATCH][MODE == 0 && VALUES == 4 ? 2 : 1];
    UNROLL for (int j = 0; j < BATCH; j++) {
      const int i = ((start + j) * THREADS + thread) / LANES, token = i % TOKENS, block = i / TOKENS;
      const int at = thread % LANES * (BLOCK / LANES);
      const i64 from = (i64)(first_token + token) * x_stride + split * SHARE + block * BLOCK + at;
      UNROLL for (int half = 0; half < (int)(sizeof(raw[0]) / 16); half++) {
        raw[j][half] = {0, 0, 0, 0};
        if (first_token + token < tokens)
          raw[j][half] = load16(x + from * (MODE == 1 ? 1 : Element<IN>::BYTES) + half * 16);
      }
    }
    if (MODE == 1) {
      UNROLL for (int j = 0; j < BATCH; j++) {
        const int i = ((start + j) * THREADS + thread) / LANES, token = i % TOKENS, block = i / TOKENS;
        *(Vec4*)(shared + X_AT + block * X_BYTES + swizzled(token, thread % 8)) = raw[j][0];
      }
      continue;
    }
    float v[BATCH][8], most[BATCH];
    UNROLL for (int j = 0; j < BATCH; j++) {
      UNROLL for (int half = 0; half < (int)(sizeof(raw[0]) / 16); half++)
        Element<IN>::unpack(raw[j][half], v[j] + half * 4);
      most[j] = 0.0f;
      UNROLL for (int c = 0; c < 8; c++) most[j] = maximum(most[j], v[j][c] < 0.0f ? -v[j][c] : v[j][c]);
    }
    UNROLL for (int mask = 8; mask; mask /= 2) {
      UNROLL for (int j = 0; j < BATCH; j++) most[j] = maximum(most[j], lane_xor(most[j], mask));
    }
    UNROLL for (int j = 0; j < BATCH; j++) {
      const int i = ((start + j) * THREADS + thread) / LANES, token = i % TOKENS, block = i / TOKENS;
      const u32 exponent = (as_bits(maximum(most[j], 1e-4f) * (1.0f / 448.0f)) + 0x7FFFFFu) >> 23;
      const float inverse = as_float((254u - exponent) << 23);
      u32 code[4];
      UNROLL for (int c = 0; c < 4; c++) code[c] = pack_e4m3x2(v[j][2 * c] * inverse, v[j][2 * c + 1] * inverse);
      u8* to = shared + X_AT + block * X_BYTES + swizzled(token, thread % 16 / 2) + thread % 2 * 8;
      *(Vec2*)to = {code[0] | code[1] << 16, code[2] | code[3] << 16};
      if (thread % 16 == 0) factors[block * TOKENS + token] = as_float(exponent << 23);
    }
  }
  if (MODE == 1) {
    for (int i = thread; i < KB * TOKENS; i += THREADS) {
      const int token = first_token + i % TOKENS;
      factors[i] = token < tokens ? given_factors[(i64)(split * KB + i / TOKENS) * tokens + token] : 0.0f;
    }
  }

  const int row0 = group % ROW_GROUPS * 64, share = group / ROW_GROUPS;
  float acc[ACC];
  UNROLL for (int i = 0; i < ACC; i++) acc[i] = 0.0f;
  UNROLL for (int b = 0; b < KB; b++) {
    copies_wait_for(KB - 1 - b);
    fence_matrix_memory();
    sync_block();
    if (b % K_GROUPS != share) continue;
    float product[ACC];
    UNROLL for (int i = 0; i < ACC; i++) product[i] = 0.0f;
    const u64 w_tile = swizzled_rows(shared + b * W_BYTES + row0 * BLOCK);
    const u64 x_tile = swizzled_rows(shared + X_AT + b * X_BYTES);
    warps_begin();
    UNROLL for (int step = 0; step < BLOCK / 32; step++)  // 32 bytes on, in units of 16
      warps_mma_e4m3<TOKENS>(product, w_tile + step * 2, x_tile + step * 2, step > 0);
    warps_commit();
    warps_wait();
    UNROLL for (int i = 0; i < ACC; i++) arrived(product[i]);
    UNROLL for (int j = 0; j < TOKENS / 8; j++) {
      const float* f = factors + b * TOKENS + j * 8 + t * 2;
      const float f0 = f[0] * w_factor[b], f1 = f[1] * w_factor[b];
      acc[j * 4] += product[j * 4] * f0, acc[j * 4 + 1] += product[j * 4 + 1] * f1;
      acc[j * 4 + 2] += product[j * 4 + 2] * f0, acc[j * 4 + 3] += product[j * 4 + 3] * f1;
    }
  }
  sync_block();
  // Shares of K within the block, then of the cluster: [token][row], the first share's place is kept.
  float* sums = (float*)shared;
  const int row = row0 + thread % 128 / 32 * 16 + g;
  if (K_GROUPS > 1) {
    if (share > 0) {
      UNROLL for (int i = 0; i < ACC; i++)
        sums[((share - 1) * TOKENS + i / 4 * 8 + t * 2 + i % 2) * RED_STRIDE + row + i % 4 / 2 * 8] = acc[i];
    }
    sync_block();
    if (share == 0) {
      UNROLL for (int s = 0; s < K_GROUPS - 1; s++) {
        UNROLL for (int i = 0; i < ACC; i++)
          acc[i] += sums[(s * TOKENS + i / 4 * 8 + t * 2 + i % 2) * RED_STRIDE + row + i % 4 / 2 * 8];
      }
    }
  }
  if (share == 0) {
    UNROLL for (int i = 0; i < ACC; i++)
      sums[(i / 4 * 8 + t * 2 + i % 2) * RED_STRIDE + row + i % 4 / 2 * 8] = acc[i];
  }
  if (SPLITS > 1) sync_cluster();
  else sync_block();
  constexpr int QUADS = ROWS / 4;  // four rows a thread; the ranks share them
  const int all = min_(TOKENS, tokens - first_token) * QUADS, each = (all + SPLITS - 1) / SPLITS;
  for (int i = split * each + thread; i < min_(all, (split + 1) * each); i += THREADS) {
    const int token = i / QUADS, at = i % QUADS * 4;
    const float* from = sums + token * RED_STRIDE + at;
    float part[SPLITS][4], total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    UNROLL for (int s = 0; s < SPLITS; s++) {
      if (SPLITS > 1) {
        peer_load4(from, s, part[s]);
      } else {
        UNROLL for (int j = 0; j < 4; j++) part[s][j] = from[j];
      }
    }
    UNROLL for (int s = 0; s < SPLITS; s++) {
      UNROLL for (int j = 0; j < 4; j++) total[j] += part[s][j];
    }
    Element<OUT>::store4(out, (i64)(first_token + token) * n + first_row + at, total);
  }
  if (SPLITS > 1) sync_cluster();  // no block ends while another reads its memory
}
HOST_ENTRY(linear_wide_kernel)
