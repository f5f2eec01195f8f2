// SPDX-License-Identifier: MIT
// How min-p, top-k and top-p see a row's changed logits: bins of 1/16 of the tempered logit below
// the greatest, counted in memory, and the list of the tokens near the greatest.
#ifndef BELLOWS_SAMPLING_BINS_GLSL
#define BELLOWS_SAMPLING_BINS_GLSL

const uint kBins = 512u; // the last for all that is far below
const float kBinsPerUnit = 16.0;
const uint kNearBins = 128u; // whose tokens are listed, where they are kListed at most

// A row's words in operand `bins`; the list's logits are followed by its ids.
const uint kListed = 4096u;
const uint kMassLow = 0u;
const uint kMassHigh = kBins;
const uint kCounts = 2u * kBins;
const uint kNumListed = 3u * kBins;
const uint kList = kNumListed + 4u;
const uint kBinWords = kList + 2u * kListed;

Settings cut_settings;
float cut_most; // greatest changed logit

// Exact products: the same token has the same bin in every kernel.
uint bin_of(float x) {
    precise float below = (x - cut_most) * cut_settings.inverse;
    precise float bins = min(below * -kBinsPerUnit, float(kBins - 1u));
    return uint(bins);
}
float power_of(float x) {
    precise float below = (x - cut_most) * cut_settings.inverse;
    return exp_f32(below);
}
// Neither forbidden nor below min-p.
bool is_eligible(float x) {
    return !is_forbidden(x) &&
           (!(cut_settings.min_p > 0.0) || power_of(x) >= cut_settings.min_p);
}

#endif
