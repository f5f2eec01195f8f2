// SPDX-License-Identifier: MIT
#pragma once

// All that training has left in a trainer, for tests that compare runs bit by bit.

#include <bellows/train/trainer.hpp>

#include <vector>

namespace bellows {

/// Collective: master weights and moments of every trained parameter that lives here. Waits.
inline std::vector<std::vector<float>> trained_tensors(Trainer& trainer) {
    std::vector<std::vector<float>> tensors;
    for (const Parted what : {Parted::Masters, Parted::FirstMoments, Parted::SecondMoments}) {
        trainer.gather(what);
        for (const Parameter& parameter : trainer.parameters().all())
            if (parameter.info.trainable())
                tensors.push_back(trainer.parameters().download_gradient(parameter.info.name));
    }
    return tensors;
}

} // namespace bellows
