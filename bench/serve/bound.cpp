// SPDX-License-Identifier: MIT
#include "serve/bound.hpp"

#include <bellows/engine/paged_attention.hpp>
#include <bellows/model/cached_layer.hpp>
#include <bellows/shape/parameters.hpp>

#include <cmath>

namespace bellows::bench {

double bytes_of_step(const ModelConfig& model, Precision precision, DType cache,
                     std::uint64_t sequences, std::uint64_t context) {
    const ParameterCount count = count_parameters(model);
    const double activation = precision == Precision::F32 ? 4 : 2,
                 linear = precision == Precision::FP8 ? 1 + 4.0 / (128 * 128) : activation,
                 experts = static_cast<double>(model.routed_experts),
                 head = static_cast<double>(model.vocabulary * model.hidden);
    double bytes = head * activation;
    double routed = 0, met = 0;
    if (model.moe_layers() > 0) {
        routed =
            experts * static_cast<double>(count.expert) * static_cast<double>(model.moe_layers());
        met = routed * (1 - std::pow(1 - static_cast<double>(model.top_k) / experts,
                                     static_cast<double>(sequences)));
    }
    bytes += (static_cast<double>(count.total - count.embedding) - routed + met) * linear;
    return bytes + static_cast<double>(sequences * context * model.layers *
                                       ops::cache_token_bytes(cache_shape(model, cache)));
}

} // namespace bellows::bench
