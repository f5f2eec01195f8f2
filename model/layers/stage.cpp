// SPDX-License-Identifier: MIT
#include "recorded_slot.hpp"

#include <bellows/base/error.hpp>
#include <bellows/model/dense_ffn.hpp>
#include <bellows/model/mtp_input.hpp>
#include <bellows/model/stage.hpp>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

namespace bellows {

struct Stage::Impl {
    struct BodyLayer {
        Layer* computes;
        std::uint64_t layer; ///< of the model
    };
    /// Of multi-token prediction.
    struct Module {
        std::unique_ptr<MtpInput> input;
        std::vector<BodyLayer> layers;
        std::unique_ptr<Head> head;
    };
    /// The residual stream before each sub-layer and after all, and its gradients.
    struct Streams {
        std::vector<Buffer> values, gradients;
    };
    struct Slot {
        std::array<Buffer, 2> ids; ///< tokens, targets
        Buffer spared;             ///< of a model with a capacity, while it trains
        Buffer documents;          ///< with a mask
        Buffer loss, logits;
        Streams body;
        std::vector<Streams> of_modules;
        std::vector<ModuleBuffers> modules;
        std::vector<std::unique_ptr<LayerSlot>> parts; ///< in the order of the forward pass
        NodeLists nodes;
    };

    Impl(const StageDesc& d, ParameterStore& p, ExpertExchange* e, ParameterStore* expert_slots);
    void make_layer(const PlacedLayer& one);
    std::unique_ptr<Slot> make_slot(std::uint64_t index);
    Streams make_streams(const std::string& name, std::size_t count) const;
    void add_layers(Slot& slot, const std::string& name, std::span<const BodyLayer> some,
                    const Streams& streams) const;
    void add_head(Slot& slot, const std::string& name) const;
    void add_modules(Slot& slot, const std::string& name, HeadSlotParts& before) const;
    Buffer host_buffer(std::string name, std::uint64_t bytes, MemoryKind kind) const;
    HeadSlotDesc head_desc(std::string name, const Streams& streams, const Buffer& targets,
                           const Buffer& loss) const;
    /// Of the slots' parts: that of a layer's first part, or of an end.
    std::size_t part_of_layer(std::uint64_t layer) const;
    std::size_t part_at(LayerPlace place) const;
    TensorView hidden(const Buffer& buffer) const {
        return buffer.tensor(parameters.activation(), {tokens, desc.config.hidden});
    }

    StageDesc desc;
    ParameterStore& parameters;
    ExpertExchange* exchange;
    ParameterStore* of_slots;
    std::vector<PlacedLayer> placed; ///< as the slots' parts are
    std::uint64_t tokens;
    LayerScratch scratch;
    RopeTable positions;
    std::vector<std::unique_ptr<Layer>> owned; ///< all but those with experts and the ends
    std::vector<std::unique_ptr<MoeFfn>> experts;
    std::vector<std::uint64_t> expert_layers;
    std::vector<BodyLayer> layers; ///< between the ends, in order
    std::unique_ptr<Embedding> embedding;
    std::unique_ptr<Head> head;
    std::vector<Module> modules;
    std::vector<std::unique_ptr<Slot>> slots;
};

namespace {

/// Modules only help to train.
StageDesc without_idle_modules(StageDesc desc) {
    if (!desc.training)
        desc.config.mtp_depth = 0;
    return desc;
}

} // namespace

Stage::Impl::Impl(const StageDesc& d, ParameterStore& p, ExpertExchange* e,
                  ParameterStore* expert_slots)
    : desc(without_idle_modules(d)), parameters(p), exchange(e), of_slots(expert_slots),
      placed(placed_layers(desc.config, desc.stage, desc.num_stages)), tokens(d.sequences * d.seq),
      scratch(p.device(), d.queue, d.weight_gradients), positions(p.device(), d.config, d.seq) {
    if (desc.training && !parameters.training())
        throw Error(ErrorCode::InvalidArgument,
                    "a stage cannot train weights that have no gradients");
    for (const PlacedLayer& layer : placed)
        make_layer(layer);
    for (std::uint64_t slot = 0; slot < desc.num_slots; ++slot)
        slots.push_back(make_slot(slot));
}

/// What computes a declared kind of layer.
void Stage::Impl::make_layer(const PlacedLayer& one) {
    const std::string kind = one.kind->name;
    const std::uint64_t layer = one.layer;
    if (kind == "mtp_input") // what follows is the module's
        modules.emplace_back();
    std::vector<BodyLayer>& of_layer = modules.empty() ? layers : modules.back().layers;
    const auto keep = [&](std::unique_ptr<Layer> made) {
        of_layer.push_back({made.get(), layer});
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
        of_layer.push_back({experts.back().get(), layer});
    } else if (kind == "head") {
        head = std::make_unique<Head>(desc.config, parameters, scratch);
    } else if (kind == "mtp_input") {
        modules.back().input = std::make_unique<MtpInput>(desc.config, layer, parameters, scratch);
    } else if (kind == "mtp_head") {
        modules.back().head = std::make_unique<Head>(desc.config, parameters, scratch, layer);
    } else {
        throw Error(ErrorCode::Internal, "nothing computes layers of kind " + kind);
    }
}

Buffer Stage::Impl::host_buffer(std::string name, std::uint64_t bytes, MemoryKind kind) const {
    return Buffer(parameters.device(), {.name = std::move(name),
                                        .bytes = std::max<std::uint64_t>(bytes, 16),
                                        .kind = kind,
                                        .category = MemoryCategory::Activations});
}

HeadSlotDesc Stage::Impl::head_desc(std::string name, const Streams& streams, const Buffer& targets,
                                    const Buffer& loss) const {
    HeadSlotDesc of_head;
    of_head.name = std::move(name);
    of_head.x = hidden(streams.values.back());
    of_head.dx = hidden(streams.gradients.back());
    of_head.targets = targets.tensor(DType::U32, {tokens});
    of_head.loss = loss.tensor(DType::F32, {2});
    return of_head;
}

void Stage::Impl::add_head(Slot& slot, const std::string& name) const {
    if (!desc.training) {
        slot.logits = host_buffer(name + " logits", tokens * desc.config.vocabulary * 4,
                                  MemoryKind::Readback);
        slot.parts.push_back(head->create_logits_slot(
            name + " head", hidden(slot.body.values.back()),
            slot.logits.tensor(DType::F32, {tokens, desc.config.vocabulary})));
        return;
    }
    slot.loss = host_buffer(name + " loss", 16, MemoryKind::Readback);
    HeadSlotDesc of_head = head_desc(name + " head", slot.body, slot.ids[1], slot.loss);
    of_head.scale = desc.loss_scale;
    of_head.module_behind = !modules.empty();
    HeadSlotParts parts = head->create_slot(of_head);
    slot.parts.push_back(std::move(parts.slot));
    add_modules(slot, name, parts);
}

/// Each takes the state behind the norm of the head before it.
void Stage::Impl::add_modules(Slot& slot, const std::string& name, HeadSlotParts& before) const {
    for (std::size_t i = 0; i < modules.size(); ++i) {
        const std::string of_module = name + " module " + std::to_string(i);
        ModuleBuffers& host = slot.modules.emplace_back();
        for (Buffer* ids : {&host.tokens, &host.targets})
            *ids = host_buffer(of_module + " tokens", tokens * 4, MemoryKind::Upload);
        host.factor = host_buffer(of_module + " factor", 16, MemoryKind::Upload);
        host.loss = host_buffer(of_module + " loss", 16, MemoryKind::Readback);
        const Streams& streams =
            slot.of_modules.emplace_back(make_streams(of_module, modules[i].layers.size() + 1));
        MtpInputSlotDesc input;
        input.name = of_module;
        input.tokens = host.tokens.tensor(DType::U32, {tokens});
        input.tensors = {before.normed, hidden(streams.values.front()),
                         hidden(streams.gradients.front()), before.normed_gradient};
        slot.parts.push_back(modules[i].input->create_slot(input));
        add_layers(slot, name, modules[i].layers, streams);
        HeadSlotDesc of_head = head_desc(of_module + " head", streams, host.targets, host.loss);
        of_head.factor = host.factor.tensor(DType::F32, {1});
        of_head.module_behind = i + 1 < modules.size();
        before = modules[i].head->create_slot(of_head);
        slot.parts.push_back(std::move(before.slot));
    }
}

Stage::Impl::Streams Stage::Impl::make_streams(const std::string& name, std::size_t count) const {
    const SlotShape shape = slot_shape(parameters, tokens, desc.seq, desc.training);
    const auto make = [&](const BufferInfo& info) {
        return Buffer(
            parameters.device(),
            {.name = name + " " + info.name, .bytes = info.bytes(0), .category = info.category});
    };
    Streams streams;
    for (std::size_t i = 0; i < count; ++i) {
        streams.values.push_back(make(residual_stream(desc.config, shape)));
        if (desc.training)
            streams.gradients.push_back(make(residual_gradient(desc.config, shape)));
    }
    return streams;
}

void Stage::Impl::add_layers(Slot& slot, const std::string& name, std::span<const BodyLayer> some,
                             const Streams& streams) const {
    for (std::size_t i = 0; i < some.size(); ++i) {
        SlotDesc layer;
        layer.name = name + " layer " + std::to_string(some[i].layer);
        layer.tokens = tokens;
        layer.seq = desc.seq;
        layer.loss_scale = desc.loss_scale;
        if (slot.spared && desc.sequences > 0)
            layer.spared = slot.spared.tensor(DType::U32, {desc.sequences});
        layer.tensors.x = hidden(streams.values[i]);
        layer.tensors.y = hidden(streams.values[i + 1]);
        if (desc.document_mask)
            layer.tensors.documents = slot.documents.tensor(DType::U32, {tokens, 2});
        if (desc.training) {
            layer.tensors.dy = hidden(streams.gradients[i + 1]);
            layer.tensors.dx = hidden(streams.gradients[i]);
        }
        slot.parts.push_back(some[i].computes->create_slot(layer));
    }
}

std::unique_ptr<Stage::Impl::Slot> Stage::Impl::make_slot(std::uint64_t index) {
    auto slot = std::make_unique<Slot>();
    const std::string name =
        "stage " + std::to_string(desc.stage) + " slot " + std::to_string(index);
    for (Buffer& ids : slot->ids)
        ids = host_buffer(name + " tokens", tokens * 4, MemoryKind::Upload);
    if (desc.training && desc.config.capacity_factor > 0 && !experts.empty()) {
        slot->spared =
            host_buffer(name + " spared sequences", desc.sequences * 4, MemoryKind::Upload);
        std::memset(slot->spared.mapped(), 0, slot->spared.size());
    }
    if (desc.document_mask)
        slot->documents = host_buffer(name + " documents", tokens * 8, MemoryKind::Upload);
    slot->body = make_streams(name, layers.size() + 1);
    slot->of_modules.reserve(modules.size());
    slot->modules.reserve(modules.size());
    if (embedding) {
        const TensorView dx = desc.training ? hidden(slot->body.gradients.front()) : TensorView{};
        slot->parts.push_back(
            embedding->create_slot({name + " embedding", slot->ids[0].tensor(DType::U32, {tokens}),
                                    hidden(slot->body.values.front()), dx}));
    }
    add_layers(*slot, name, layers, slot->body);
    if (head)
        add_head(*slot, name);
    slot->nodes = NodeLists(slot->parts);
    return slot;
}

std::size_t Stage::Impl::part_of_layer(std::uint64_t layer) const {
    const auto part = std::ranges::find_if(placed, [layer](const PlacedLayer& one) {
        return one.kind->place != LayerPlace::Front && one.kind->place != LayerPlace::Back &&
               one.layer == layer;
    });
    return static_cast<std::size_t>(part - placed.begin());
}

std::size_t Stage::Impl::part_at(LayerPlace place) const {
    const auto part =
        std::ranges::find(placed, place, [](const PlacedLayer& one) { return one.kind->place; });
    return static_cast<std::size_t>(part - placed.begin());
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
    return stands_on_stage(impl_->desc.config, info, impl_->desc.stage, impl_->desc.num_stages);
}

std::size_t Stage::gradient_ready_after(const ParameterInfo& info) const {
    const std::vector<std::size_t>& last = impl_->slots.front()->nodes.last_weight_gradient();
    if (info.layer >= 0) // the first part of the layer, attention, is the last to go back
        return last.at(impl_->part_of_layer(static_cast<std::uint64_t>(info.layer)));
    // The model's head goes back behind the modules, which add to the same gradients.
    const bool front = info.kind == ParameterKind::Embedding && first();
    return last.at(impl_->part_at(front ? LayerPlace::Front : LayerPlace::Back));
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
Buffer* Stage::spared_buffer(std::uint64_t slot) {
    Buffer& spared = impl_->slots.at(slot)->spared;
    return spared ? &spared : nullptr;
}
const ModelConfig& Stage::model() const noexcept {
    return impl_->desc.config;
}
Buffer& Stage::documents_buffer(std::uint64_t slot) {
    return impl_->slots.at(slot)->documents;
}
bool Stage::masks_documents() const noexcept {
    return impl_->desc.document_mask;
}
Buffer& Stage::loss_buffer(std::uint64_t slot) {
    return impl_->slots.at(slot)->loss;
}
std::span<ModuleBuffers> Stage::module_buffers(std::uint64_t slot) {
    return impl_->slots.at(slot)->modules;
}
Buffer& Stage::logits_buffer(std::uint64_t slot) {
    return impl_->slots.at(slot)->logits;
}

TensorView Stage::input(std::uint64_t slot) const {
    return impl_->hidden(impl_->slots.at(slot)->body.values.front());
}
TensorView Stage::output(std::uint64_t slot) const {
    return impl_->hidden(impl_->slots.at(slot)->body.values.back());
}
TensorView Stage::output_gradient(std::uint64_t slot) const {
    return impl_->hidden(impl_->slots.at(slot)->body.gradients.back());
}
TensorView Stage::input_gradient(std::uint64_t slot) const {
    return impl_->hidden(impl_->slots.at(slot)->body.gradients.front());
}

const std::vector<std::unique_ptr<MoeFfn>>& Stage::moe_layers() const noexcept {
    return impl_->experts;
}
std::uint64_t Stage::moe_layer_index(std::size_t i) const {
    return impl_->expert_layers.at(i);
}

} // namespace bellows
