// SPDX-License-Identifier: MIT
#include "recorded_slot.hpp"

#include <bellows/base/error.hpp>
#include <bellows/model/dense_ffn.hpp>
#include <bellows/model/stage.hpp>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

namespace bellows {

struct Stage::Impl {
    struct BodyLayer {
        Layer* computes;
        std::uint64_t layer; ///< of the model
    };
    struct Slot {
        std::array<Buffer, 2> ids; ///< tokens, targets
        Buffer loss, logits;
        std::vector<Buffer> streams; ///< the residual stream before each sub-layer and after all
        std::vector<Buffer> gradients;
        std::vector<std::unique_ptr<LayerSlot>> parts; ///< in the order of the forward pass
        NodeLists nodes;
    };

    Impl(const StageDesc& d, ParameterStore& p, ExpertExchange* e, ParameterStore* expert_slots);
    void make_layer(const PlacedLayer& placed);
    std::unique_ptr<Slot> make_slot(std::uint64_t index);
    void add_ends(Slot& slot, const std::string& name);
    TensorView hidden(const Buffer& buffer) const {
        return buffer.tensor(parameters.activation(), {tokens, desc.config.hidden});
    }

    StageDesc desc;
    ParameterStore& parameters;
    ExpertExchange* exchange;
    ParameterStore* of_slots;
    LayerRange range;
    std::uint64_t tokens;
    LayerScratch scratch;
    RopeTable positions;
    std::vector<std::unique_ptr<Layer>> owned; ///< all but those with experts and the ends
    std::vector<std::unique_ptr<MoeFfn>> experts;
    std::vector<std::uint64_t> expert_layers;
    std::vector<BodyLayer> layers; ///< between the ends, in order
    std::unique_ptr<Embedding> embedding;
    std::unique_ptr<Head> head;
    std::vector<std::unique_ptr<Slot>> slots;
};

Stage::Impl::Impl(const StageDesc& d, ParameterStore& p, ExpertExchange* e,
                  ParameterStore* expert_slots)
    : desc(d), parameters(p), exchange(e), of_slots(expert_slots),
      range(layers_of_stage(d.config, d.stage, d.num_stages)), tokens(d.sequences * d.seq),
      scratch(p.device(), d.queue, d.weight_gradients), positions(p.device(), d.config, d.seq) {
    if (desc.training && !parameters.training())
        throw Error(ErrorCode::InvalidArgument,
                    "a stage cannot train weights that have no gradients");
    for (const PlacedLayer& layer : placed_layers(desc.config, desc.stage, desc.num_stages))
        make_layer(layer);
    for (std::uint64_t slot = 0; slot < desc.num_slots; ++slot)
        slots.push_back(make_slot(slot));
}

/// What computes a declared kind of layer.
void Stage::Impl::make_layer(const PlacedLayer& placed) {
    const std::string kind = placed.kind->name;
    const std::uint64_t layer = placed.layer;
    const auto keep = [&](std::unique_ptr<Layer> made) {
        layers.push_back({made.get(), layer});
        owned.push_back(std::move(made));
    };
    if (kind == "embedding") {
        embedding = std::make_unique<Embedding>(parameters, scratch);
    } else if (kind == "mla") {
        keep(std::make_unique<MlaAttention>(desc.config, layer, parameters, positions, scratch));
    } else if (kind == "gqa") {
        keep(std::make_unique<GqaAttention>(desc.config, layer, parameters, positions, scratch));
    } else if (kind == "dense_ffn") {
        keep(std::make_unique<DenseFfn>(desc.config, layer, parameters, scratch));
    } else if (kind == "moe_ffn") {
        if (exchange == nullptr)
            throw Error(ErrorCode::InvalidArgument,
                        "layer " + std::to_string(layer) + " has experts but no exchange");
        experts.push_back(std::make_unique<MoeFfn>(desc.config, layer, parameters, *exchange,
                                                   &scratch, of_slots));
        expert_layers.push_back(layer);
        layers.push_back({experts.back().get(), layer});
    } else if (kind == "head") {
        head = std::make_unique<Head>(desc.config, parameters, scratch);
    } else {
        throw Error(ErrorCode::Internal, "nothing computes layers of kind " + kind);
    }
}

void Stage::Impl::add_ends(Slot& slot, const std::string& name) {
    Device& device = parameters.device();
    const auto id_view = [&](const Buffer& buffer) { return buffer.tensor(DType::U32, {tokens}); };
    if (embedding) {
        const TensorView dx = desc.training ? hidden(slot.gradients.front()) : TensorView{};
        slot.parts.insert(slot.parts.begin(),
                          embedding->create_slot({name + " embedding", id_view(slot.ids[0]),
                                                  hidden(slot.streams.front()), dx}));
    }
    if (!head)
        return;
    if (!desc.training) {
        slot.logits = Buffer(device, {.name = name + " logits",
                                      .bytes = tokens * desc.config.vocabulary * 4,
                                      .kind = MemoryKind::Readback,
                                      .category = MemoryCategory::Activations});
        slot.parts.push_back(head->create_logits_slot(
            name + " head", hidden(slot.streams.back()),
            slot.logits.tensor(DType::F32, {tokens, desc.config.vocabulary})));
        return;
    }
    slot.loss = Buffer(device, {.name = name + " loss",
                                .bytes = 16,
                                .kind = MemoryKind::Readback,
                                .category = MemoryCategory::Activations});
    HeadSlotDesc head_desc;
    head_desc.name = name + " head";
    head_desc.x = hidden(slot.streams.back());
    head_desc.dx = hidden(slot.gradients.back());
    head_desc.targets = id_view(slot.ids[1]);
    head_desc.loss = slot.loss.tensor(DType::F32, {2});
    head_desc.scale = desc.loss_scale;
    slot.parts.push_back(head->create_slot(head_desc));
}

std::unique_ptr<Stage::Impl::Slot> Stage::Impl::make_slot(std::uint64_t index) {
    Device& device = parameters.device();
    auto slot = std::make_unique<Slot>();
    const std::string name =
        "stage " + std::to_string(desc.stage) + " slot " + std::to_string(index);
    for (Buffer& ids : slot->ids)
        ids = Buffer(device, {.name = name + " tokens",
                              .bytes = std::max<std::uint64_t>(tokens * 4, 16),
                              .kind = MemoryKind::Upload,
                              .category = MemoryCategory::Activations});
    const SlotShape shape = slot_shape(parameters, tokens, desc.seq, desc.training);
    const auto make = [&](const BufferInfo& info) {
        return Buffer(
            device,
            {.name = name + " " + info.name, .bytes = info.bytes(0), .category = info.category});
    };
    for (std::size_t i = 0; i <= layers.size(); ++i) {
        slot->streams.push_back(make(residual_stream(desc.config, shape)));
        if (desc.training)
            slot->gradients.push_back(make(residual_gradient(desc.config, shape)));
    }
    for (std::size_t i = 0; i < layers.size(); ++i) {
        SlotDesc layer;
        layer.name = name + " layer " + std::to_string(layers[i].layer);
        layer.tokens = tokens;
        layer.seq = desc.seq;
        layer.loss_scale = desc.loss_scale;
        layer.tensors.x = hidden(slot->streams[i]);
        layer.tensors.y = hidden(slot->streams[i + 1]);
        if (desc.training) {
            layer.tensors.dy = hidden(slot->gradients[i + 1]);
            layer.tensors.dx = hidden(slot->gradients[i]);
        }
        slot->parts.push_back(layers[i].computes->create_slot(layer));
    }
    add_ends(*slot, name);
    slot->nodes = NodeLists(slot->parts);
    return slot;
}

Stage::Stage(const StageDesc& desc, ParameterStore& parameters, ExpertExchange* exchange,
             ParameterStore* slots)
    : impl_(std::make_unique<Impl>(desc, parameters, exchange, slots)) {
}
Stage::~Stage() = default;

bool Stage::first() const noexcept {
    return impl_->embedding != nullptr;
}
bool Stage::last() const noexcept {
    return impl_->head != nullptr;
}
std::uint64_t Stage::tokens() const noexcept {
    return impl_->tokens;
}
QueueRole Stage::queue() const noexcept {
    return impl_->desc.queue;
}

const std::vector<const Node*>& Stage::nodes(std::uint64_t slot, NodeKind kind) const {
    return impl_->slots.at(slot)->nodes.of(kind);
}

bool Stage::has(const ParameterInfo& info) const noexcept {
    if (info.layer >= 0) {
        const auto layer = static_cast<std::uint64_t>(info.layer);
        return layer >= impl_->range.first && layer < impl_->range.end;
    }
    return info.kind == ParameterKind::Embedding
               ? first() || (last() && impl_->desc.config.tied_embeddings)
               : last();
}

std::size_t Stage::gradient_ready_after(const ParameterInfo& info) const {
    const std::vector<std::size_t>& last = impl_->slots.front()->nodes.last_weight_gradient();
    const std::size_t ahead = first() ? 1 : 0; // the embedding's part
    if (info.layer >= 0) { // the first part of the layer, attention, is the last to go back
        const auto part = std::ranges::find(impl_->layers, static_cast<std::uint64_t>(info.layer),
                                            &Impl::BodyLayer::layer);
        return last.at(ahead + static_cast<std::size_t>(part - impl_->layers.begin()));
    }
    return info.kind == ParameterKind::Embedding && first() ? last.front() : last.back();
}

std::vector<PairNode> Stage::pair_nodes(NodeKind kind) const {
    return impl_->slots.front()->nodes.pair_nodes(kind);
}

Buffer& Stage::token_buffer(std::uint64_t slot) {
    return impl_->slots.at(slot)->ids[0];
}
Buffer& Stage::target_buffer(std::uint64_t slot) {
    return impl_->slots.at(slot)->ids[1];
}
Buffer& Stage::loss_buffer(std::uint64_t slot) {
    return impl_->slots.at(slot)->loss;
}
Buffer& Stage::logits_buffer(std::uint64_t slot) {
    return impl_->slots.at(slot)->logits;
}

TensorView Stage::input(std::uint64_t slot) const {
    return impl_->hidden(impl_->slots.at(slot)->streams.front());
}
TensorView Stage::output(std::uint64_t slot) const {
    return impl_->hidden(impl_->slots.at(slot)->streams.back());
}
TensorView Stage::output_gradient(std::uint64_t slot) const {
    return impl_->hidden(impl_->slots.at(slot)->gradients.back());
}
TensorView Stage::input_gradient(std::uint64_t slot) const {
    return impl_->hidden(impl_->slots.at(slot)->gradients.front());
}

const std::vector<std::unique_ptr<MoeFfn>>& Stage::moe_layers() const noexcept {
    return impl_->experts;
}
std::uint64_t Stage::moe_layer_index(std::size_t i) const {
    return impl_->expert_layers.at(i);
}

} // namespace bellows
