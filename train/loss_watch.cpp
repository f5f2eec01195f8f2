// SPDX-License-Identifier: MIT
#include <bellows/train/loss_watch.hpp>

#include <algorithm>
#include <cmath>

namespace bellows {

LossWatch::LossWatch(std::uint64_t vocabulary)
    : margin_(std::log(static_cast<double>(std::max<std::uint64_t>(vocabulary, 2))) / 2) {
}

bool LossWatch::exploded(double loss) const {
    return !std::isfinite(loss) || (best_ && loss > *best_ + margin_);
}

void LossWatch::take(double loss) {
    if (exploded(loss))
        return;
    ++taken_;
    mean_ += (loss - mean_) / std::min(static_cast<double>(taken_), kSmoothed);
    best_ = best_ ? std::min(*best_, mean_) : mean_;
}

} // namespace bellows
