// The context of a block drafter: keys and values that its layers make of the target's features.
// Python reference: outpace.drafters.dflash.net.DFlashNet, `fuse` and `context`.
#pragma once
#include "decoder.h"

// The columns of a matrix's result from `first` on, which must begin a panel.
static inline Matrix results_from(const Matrix& m, int first) {
  Matrix rest = m;
  rest.panels = (const char*)m.panels + first / kPanel * panel_bytes(m);
  if (m.scales) rest.scales = m.scales + first;
  if (m.bias) rest.bias = m.bias + first;
  rest.outputs = m.outputs - first;
  return rest;
}

// Features fused by `fc` and one norm, left in pass.x, and every layer's keys and values of them (DFlash, target
// context).
static inline void write_context(Team& team, const Decoder& d, const Matrix& fc, const float* norm,
                                 const float* features, const Pass& pass, Work& work) {
  const int rows = pass.rows, width = 2 * d.kv_heads * d.head_dim;
  prepare_rows(team, features, rows, nullptr, 0, fc, work.space);
  multiply(team, fc, work.space.operand(fc, rows), false, pass.x, d.hidden);
  team.share(rows, [&](int row) {
    float* own = pass.x + size_t(row) * d.hidden;
    rms_norm(own, norm, d.eps, d.hidden, own);
  });
  for (int index = 0; index < d.count; ++index) {
    const Matrix kv = results_from(d.layers[index].qkv, d.heads * d.head_dim);
    if (index == 0) prepare_rows(team, pass.x, rows, nullptr, 0, kv, work.space);  // the same for all layers
    multiply(team, kv, work.space.operand(kv, rows), false, work.qkv.data(), width);
    team.share(rows, [&](int row) { place_keys(d, pass, index, row, &work.qkv[size_t(row) * width]); });
  }
}
