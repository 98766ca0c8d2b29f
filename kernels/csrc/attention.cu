// Sparse attention of decode rows: see kernels/sparse_mla_decode.py for keys, masks and the softmax.
//
// The SPLITS blocks of a cluster share a row's tiles of 32 keys and merge through each other's shared
// memory, in rank order. A block has 8 warps and 16 heads: raw key bytes arrive in a ring of RING
// buffers, are turned into fp16 once, scores are taken by (16 keys, a quarter of the channels) a warp, the
// softmax by two heads a warp, and values by 64 channels a warp.
//
// Build with KIND (0 window only, 1 selected entries, 2 all entries), SPLITS, RING, Q_TYPE, OUT.
#include "device.cuh"

constexpr int TILE = 32, WINDOW = 128, WINDOW_TILES = WINDOW / TILE, CHANNELS = 512, HEADS = 16;
constexpr int DATA = 576, SCALES = 8, NOPE = 448;
constexpr int K_STRIDE = CHANNELS * 2 + 16;  // bytes: 16 of padding keep matrix loads off each other
constexpr int S_STRIDE = 36, P_STRIDE = 80;  // floats, bytes
constexpr int RAW = TILE * K_STRIDE, RAW_BYTES = TILE * (DATA + SCALES);
constexpr int SCORES = RAW + RING * RAW_BYTES, PROBS = SCORES + 4 * HEADS * S_STRIDE * 4;
constexpr int ALPHA = PROBS + HEADS * P_STRIDE, PEAKS = ALPHA + HEADS * 4;  // of all ranks
constexpr int TOTALS = PEAKS + SPLITS * HEADS * 4;
constexpr float LOG2E = 1.4426950408889634f;
static_assert(HEADS * CHANNELS * 4 <= RAW, "the result of a block takes the place of its keys");

struct Keys {
  const u8 *window, *pages;
  const int *table, *selected;
  int window_first, window_keys, entries, ring_rows, page_rows, top_k;
  i64 page_stride;

  DEVICE bool in_window(int j) const { return j < WINDOW; }
  DEVICE bool live(int j) const { return j < WINDOW ? j < window_keys : j - WINDOW < entries; }
  // Of keys that are not live it is whatever stands there, and nobody uses it.
  DEVICE int entry(int j) const {
    if (KIND == 0 || in_window(j)) return 0;
    if (KIND == 2) return j - WINDOW;
    return j - WINDOW < top_k ? selected[j - WINDOW] : 0;
  }
  DEVICE int page(int j, int entry) const {
    return KIND == 0 || in_window(j) || !live(j) ? 0 : table[entry / page_rows];
  }
  // Copies this thread's eighth of key j.
  DEVICE void fetch(int j, int entry, int page, u8* raw, int key, int part) const {
    const bool is_live = live(j);
    const u8 *data, *scale;
    if (in_window(j)) {
      const int row = (window_first + j) % ring_rows;
      data = window + (i64)row * DATA;
      scale = window + (i64)ring_rows * DATA + row * SCALES;
    } else {
      const u8* base = pages + page * page_stride;
      const int row = is_live ? entry % page_rows : 0;
      data = base + (i64)row * DATA;
      scale = base + (i64)page_rows * DATA + row * SCALES;
    }
    UNROLL for (int i = 0; i < 5; i++) {
      const int chunk = i * 8 + part;
      if (chunk < DATA / 16) copy16_async(raw + key * DATA + chunk * 16, data + chunk * 16, is_live);
    }
    if (part == 0) copy8_async(raw + TILE * DATA + key * SCALES, scale, is_live);
  }
};

// This thread's eighth of a key as fp16.
DEVICE void dequantise(const u8* raw, u8* keys, int key, int part) {
  const u8* source = raw + key * DATA;
  const u8* exponents = raw + TILE * DATA + key * SCALES;
  u8* target = keys + key * K_STRIDE;
  UNROLL for (int i = 0; i < 4; i++) {
    const int chunk = i * 8 + part;
    if (chunk >= NOPE / 16) continue;
    const Vec4 codes = *(const Vec4*)(source + chunk * 16);
    const float factor = as_float((u32)exponents[chunk / 4] << 23);
    const u32 scale = pack_f16x2(factor, factor);
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
    u32 halves[8];
    UNROLL for (int w = 0; w < 4; w++) {
      halves[2 * w] = mul_f16x2(e4m3x2_to_f16x2((u16)words[w]), scale);
      halves[2 * w + 1] = mul_f16x2(e4m3x2_to_f16x2((u16)(words[w] >> 16)), scale);
    }
    *(Vec4*)(target + chunk * 32) = {halves[0], halves[1], halves[2], halves[3]};
    *(Vec4*)(target + chunk * 32 + 16) = {halves[4], halves[5], halves[6], halves[7]};
  }
  const Vec4 rope = *(const Vec4*)(source + NOPE + part * 16);
  *(Vec4*)(target + NOPE * 2 + part * 16) = {
      pack_f16x2(bf16_low(rope.x), bf16_high(rope.x)), pack_f16x2(bf16_low(rope.y), bf16_high(rope.y)),
      pack_f16x2(bf16_low(rope.z), bf16_high(rope.z)), pack_f16x2(bf16_low(rope.w), bf16_high(rope.w))};
}

KERNEL(256, 2)
attend_kernel(const u8* q, const u8* slots, const u8* pages, const int* slot_of_row,
              const int* position_of_row, const int* page_table, const int* selected,
              const int* selected_count, const float* sink, void* out, i64 slot_stride,
              i64 window_offset, i64 page_stride, i64 part_offset, i64 table_stride, int heads,
              int ring_rows, int page_rows, int ratio, int top_k, float qk_scale) {
  SHARED_BYTES(shared);
  let_next_start();
  if (SPLITS > 1) cluster_arrive();  // everybody is there: waited for before the first word is sent
  await_previous();
  const int thread = thread_id(), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int split = block_x(), row = block_y(), first_head = block_z() * HEADS;
  const int key = thread / 8, part = thread % 8;  // which key of a tile this thread fetches
  Keys keys;
  keys.selected = selected + (i64)row * top_k, keys.top_k = top_k;
  // Entries are looked up as if all were selected, before it is known how many are.
  constexpr int AHEAD = RING + 1;
  const int guess = (WINDOW_TILES + top_k / TILE) * split / SPLITS;
  int entry[AHEAD], page[RING];
  if (KIND == 1) {
    UNROLL for (int i = 0; i < AHEAD; i++) entry[i] = keys.entry((guess + i) * TILE + key);
  }
  const int position = position_of_row[row];
  const i64 slot = slot_of_row[row];
  keys.window = slots + slot * slot_stride + window_offset;
  keys.pages = pages + part_offset;
  keys.table = page_table + slot * table_stride;
  keys.window_keys = min_(position + 1, WINDOW);
  keys.window_first = position + 1 - keys.window_keys;
  keys.entries = KIND == 0 ? 0 : KIND == 1 ? selected_count[row] : (position + 1) / ratio;
  keys.ring_rows = ring_rows, keys.page_rows = page_rows, keys.page_stride = page_stride;
  const int tiles = position < 0 ? 0 : WINDOW_TILES + (keys.entries + TILE - 1) / TILE;
  const int begin = (int)((i64)tiles * split / SPLITS), end = (int)((i64)tiles * (split + 1) / SPLITS);

  // Where the keys lie: entries three tiles ahead, pages two.
  if (KIND != 1 || begin != guess) {
    UNROLL for (int i = 0; i < AHEAD; i++) entry[i] = keys.entry((begin + i) * TILE + key);
  }
  UNROLL for (int i = 0; i < RING; i++) page[i] = keys.page((begin + i) * TILE + key, entry[i]);
  UNROLL for (int i = 0; i < RING - 1; i++) {
    const int tile = begin + i;
    if (tile < end)
      keys.fetch(tile * TILE + key, entry[i], page[i], shared + RAW + i * RAW_BYTES, key, part);
    copies_commit();
  }
  int entry_now = entry[RING - 1], page_now = page[RING - 1], entry_next = entry[RING];

  // Queries as fp16 rows where the keys will be, then as fragments: 128 channels of 16 heads a warp.
  for (int i = thread; i < HEADS * CHANNELS / 8; i += 256) {
    const int head = i / (CHANNELS / 8), at = i % (CHANNELS / 8) * 8;
    Vec4 v = {0, 0, 0, 0};
    if (first_head + head < heads)
      v = load16(q + (((i64)row * heads + first_head + head) * CHANNELS + at) * 2);
    if (Q_TYPE == 1)
      v = {pack_f16x2(bf16_low(v.x), bf16_high(v.x)), pack_f16x2(bf16_low(v.y), bf16_high(v.y)),
           pack_f16x2(bf16_low(v.z), bf16_high(v.z)), pack_f16x2(bf16_low(v.w), bf16_high(v.w))};
    *(Vec4*)(shared + head * K_STRIDE + at * 2) = v;
  }
  sync_block();
  const int quarter = warp / 2, key_half = warp % 2 * 16;
  u32 query[8][4];
  UNROLL for (int s = 0; s < 8; s++)
    load_matrices(query[s], shared + (lane % 16) * K_STRIDE + (quarter * 128 + s * 16 + lane / 16 * 8) * 2);
  sync_block();

  float acc[8][4], peak = -infinity(), total = 0.0f;
  UNROLL for (int n = 0; n < 8; n++) {
    UNROLL for (int i = 0; i < 4; i++) acc[n][i] = 0.0f;
  }
  float* scores = (float*)(shared + SCORES);
  float* alphas = (float*)(shared + ALPHA);
  for (int tile = begin; tile < end; tile++) {
    copies_wait<RING - 2>();
    sync_block();  // the tile's bytes are here, and nobody uses the last tile's keys any more
    const int ahead = tile + RING - 1;
    if (ahead < end)
      keys.fetch(ahead * TILE + key, entry_now, page_now,
                 shared + RAW + (ahead - begin) % RING * RAW_BYTES, key, part);
    copies_commit();
    entry_now = entry_next;
    page_now = keys.page((ahead + 1) * TILE + key, entry_now);
    entry_next = keys.entry((ahead + 2) * TILE + key);
    dequantise(shared + RAW + (tile - begin) % RING * RAW_BYTES, shared, key, part);
    sync_block();
    // scores [16 heads, 16 keys] over a quarter of the channels
    UNROLL for (int n = 0; n < 2; n++) {
      float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      const u8* from = shared + (key_half + n * 8 + lane % 8) * K_STRIDE + (quarter * 128 + lane / 8 * 8) * 2;
      UNROLL for (int i = 0; i < 4; i++) {
        u32 b[4];
        load_matrices(b, from + i * 64);
        mma_f16(s, query[2 * i], b[0], b[1]);
        mma_f16(s, query[2 * i + 1], b[2], b[3]);
      }
      float* mine = scores + (quarter * HEADS + g) * S_STRIDE + key_half + n * 8 + t * 2;
      mine[0] = s[0], mine[1] = s[1];
      mine[8 * S_STRIDE] = s[2], mine[8 * S_STRIDE + 1] = s[3];
    }
    sync_block();
    // softmax: two heads a warp, two keys a lane
    const int head = warp * 2 + lane / 16, at = lane % 16 * 2;
    const float* all = scores + head * S_STRIDE + at;
    const int j = tile * TILE + at;
    float sum0 = 0.0f, sum1 = 0.0f;
    UNROLL for (int i = 0; i < 4; i++) sum0 += all[i * HEADS * S_STRIDE], sum1 += all[i * HEADS * S_STRIDE + 1];
    const float s0 = keys.live(j) ? sum0 * qk_scale : -infinity();
    const float s1 = keys.live(j + 1) ? sum1 * qk_scale : -infinity();
    float top = maximum(s0, s1);
    UNROLL for (int mask = 8; mask; mask /= 2) top = maximum(top, lane_xor(top, mask));
    top = maximum(top, peak);
    const float safe = top == -infinity() ? 0.0f : top;
    const float p0 = exp2_fast(s0 - safe), p1 = exp2_fast(s1 - safe), alpha = exp2_fast(peak - safe);
    float sum = p0 + p1;
    UNROLL for (int mask = 8; mask; mask /= 2) sum += lane_xor(sum, mask);
    total = total * alpha + sum;
    peak = top;
    *(u32*)(shared + PROBS + head * P_STRIDE + at * 2) = pack_f16x2(p0, p1);
    if (lane % 16 == 0) alphas[head] = alpha;
    sync_block();
    // values: 64 channels a warp
    const float alpha_a = alphas[g], alpha_b = alphas[g + 8];
    UNROLL for (int n = 0; n < 8; n++) {
      acc[n][0] *= alpha_a, acc[n][1] *= alpha_a, acc[n][2] *= alpha_b, acc[n][3] *= alpha_b;
    }
    UNROLL for (int k = 0; k < 2; k++) {
      u32 a[4];
      load_matrices(a, shared + PROBS + (lane % 16) * P_STRIDE + (k * 16 + lane / 16 * 8) * 2);
      UNROLL for (int c = 0; c < 4; c++) {
        u32 b[4];
        const int from = k * 16 + lane / 8 % 2 * 8 + lane % 8;
        load_matrices_transposed(b, shared + from * K_STRIDE + (warp * 64 + c * 16 + lane / 16 * 8) * 2);
        mma_f16(acc[2 * c], a, b[0], b[1]);
        mma_f16(acc[2 * c + 1], a, b[2], b[3]);
      }
    }
  }
  copies_wait<0>();
  sync_block();
  // The block's result where its keys were: fp32 [16 heads, 512 channels], peaks and totals.
  float* result = (float*)shared;
  UNROLL for (int n = 0; n < 8; n++) {
    float* place = result + g * CHANNELS + warp * 64 + n * 8 + t * 2;
    place[0] = acc[n][0], place[1] = acc[n][1];
    place[8 * CHANNELS] = acc[n][2], place[8 * CHANNELS + 1] = acc[n][3];
  }
  float *peaks = (float*)(shared + PEAKS), *totals = (float*)(shared + TOTALS);  // [rank][head]
  if (SPLITS > 1) {  // sixteen lanes have the same head: they send it to the ranks
    cluster_wait();
    const int place = split * HEADS + warp * 2 + lane / 16;
    if (lane % 16 < SPLITS) peer_store(peaks + place, lane % 16, peak), peer_store(totals + place, lane % 16, total);
    sync_cluster();
  } else {
    if (lane % 16 == 0) peaks[warp * 2 + lane / 16] = peak, totals[warp * 2 + lane / 16] = total;
    sync_block();
  }
  constexpr int SHARE = CHANNELS / SPLITS;  // channels that this block merges
  for (int i = thread; i < HEADS * SHARE / 4; i += 256) {
    const int head = i / (SHARE / 4), at = split * SHARE + i % (SHARE / 4) * 4;
    if (first_head + head >= heads) continue;
    const float logit = sink[first_head + head] * LOG2E;
    float top = logit;
    UNROLL for (int s = 0; s < SPLITS; s++) top = maximum(top, peaks[s * HEADS + head]);
    float denominator = exp2_fast(logit - top), o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    UNROLL for (int s = 0; s < SPLITS; s++) {
      float v[4];
      const float* from = result + head * CHANNELS + at;
      const float factor = exp2_fast(peaks[s * HEADS + head] - top);
      denominator += totals[s * HEADS + head] * factor;
      if (SPLITS > 1) {
        peer_load4(from, s, v);
      } else {
        UNROLL for (int c = 0; c < 4; c++) v[c] = from[c];
      }
      UNROLL for (int c = 0; c < 4; c++) o[c] += v[c] * factor;
    }
    const float inverse = 1.0f / denominator;
    UNROLL for (int c = 0; c < 4; c++) o[c] *= inverse;
    Element<OUT>::store4(out, ((i64)row * heads + first_head + head) * CHANNELS + at, o);
  }
  if (SPLITS > 1) sync_cluster();  // no block ends while another reads its memory
}
HOST_ENTRY(attend_kernel)
