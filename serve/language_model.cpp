// SPDX-License-Identifier: MIT
#include <bellows/serve/language_model.hpp>

#include <bellows/base/error.hpp>
#include <bellows/checkpoint/weights.hpp>
#include <bellows/comm/message.hpp>
#include <bellows/engine/gemm_plan.hpp>
#include <bellows/model/stage.hpp>
#include <bellows/run/kernels.hpp>
#include <bellows/shape/groups.hpp>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

namespace bellows {

namespace {

/// What a model is made from, checked.
struct Source {
    Source(const std::filesystem::path& path, const LanguageModelOptions& options);

    /// One of these two.
    std::optional<Checkpoint> checkpoint;
    std::optional<HfFolder> folder;
    ModelConfig model;
    TrainingShape shape; ///< of the run that wrote it, as far as the options do not say otherwise
    KernelNames kernels; ///< that the run chose; none of a folder
};

Source::Source(const std::filesystem::path& path, const LanguageModelOptions& options) {
    if (HfFolder::is_one(path)) {
        constexpr std::uint64_t kMostSeq = 512;
        folder.emplace(path);
        model = folder->config().model;
        shape.seq = std::min(model.max_context > 0 ? model.max_context : kMostSeq, kMostSeq);
        shape.precision = folder->main_type() == StoredType::F32 ? Precision::F32 : Precision::BF16;
    } else {
        checkpoint.emplace(Checkpoint::open(path));
        const std::string config = checkpoint->text(kConfigFile);
        const std::string name = (checkpoint->folder() / kConfigFile).string();
        model = parse_model_config(config, name);
        shape = parse_training_shape(config, name);
        kernels = checkpoint->state().kernels;
    }
    if (options.seq > 0)
        shape.seq = options.seq;
    if (options.precision && *options.precision != shape.precision) {
        shape.precision = *options.precision;
        kernels.clear(); // of another precision
    }
}

} // namespace

struct LanguageModel::Impl {
    Impl(const DeviceOptions& device_options, const std::filesystem::path& path,
         const LanguageModelOptions& options);
    void load(const std::function<void(std::uint64_t, std::uint64_t)>& on_progress);
    /// Nobody has chosen them for this precision yet.
    bool kernels_are_open(const std::string& key) const {
        return !key.empty() && source.kernels.empty();
    }

    /// [seq, vocabulary]; valid until the next call. Tokens beyond the text are zeros, which
    /// causality hides from it.
    std::span<const float> forward(std::span<const std::uint32_t> text);
    std::span<const float> row(std::span<const float> logits, std::uint64_t index) const {
        return logits.subspan(index * model.vocabulary, model.vocabulary);
    }

    Source source;
    const ModelConfig& model;
    const TrainingShape& shape;
    std::chrono::milliseconds timeout;
    World world;
    std::unique_ptr<Device> device;
    std::unique_ptr<Transport> transport;
    HostThread thread;
    ParameterStore parameters;
    std::optional<ExpertExchange> exchange;
    std::optional<Stage> stage;
};

LanguageModel::Impl::Impl(const DeviceOptions& device_options, const std::filesystem::path& path,
                          const LanguageModelOptions& options)
    : source(path, options), model(source.model), shape(source.shape), timeout(options.timeout),
      world(World::single()), device(Device::create(device_options)),
      transport(open_transport(world)), thread(*device, "exchange"),
      parameters(*device, parameters_of_stage(model, 0, 1, 0, 1), activation_type(shape.precision),
                 false, linear_precision(shape.precision), {},
                 source.folder ? linear_forms(*source.folder) : LinearForms{}) {
    if (const std::string key = products_key(shape.precision); kernels_are_open(key))
        source.kernels[key] = usual_products(*device, key);
    if (parameters.activation() == DType::BF16)
        use_gemm_class(*device, kept_kernels(source.kernels, device->options()).chosen["gemm"]);
    parameters.use_products(products_of(source.kernels, shape.precision, *device));
    load(options.on_progress);
    if (model.moe_layers() > 0)
        exchange.emplace(*device, world, *transport, thread,
                         exchange_config(model, shape.precision, {}, 0, 0, shape.seq));
    StageDesc desc;
    desc.config = model;
    desc.seq = shape.seq;
    desc.training = false;
    stage.emplace(desc, parameters, exchange ? &*exchange : nullptr);
}

void LanguageModel::Impl::load(
    const std::function<void(std::uint64_t, std::uint64_t)>& on_progress) {
    if (source.checkpoint)
        return load_weights(*source.checkpoint, parameters);
    load_weights(*source.folder, parameters, {}, [&](std::uint64_t elements) {
        if (on_progress)
            on_progress(elements, parameters.num_elements());
    });
}

std::span<const float> LanguageModel::Impl::forward(std::span<const std::uint32_t> text) {
    const auto tokens = stage->token_buffer(0).mapped_as<std::uint32_t>();
    std::fill(tokens.begin(), tokens.end(), 0u);
    std::copy(text.begin(), text.end(), tokens.begin());
    for (const Node* node : stage->nodes(0, NodeKind::Forward))
        node->submit({});
    device->wait_idle(timeout);
    return stage->logits_buffer(0).mapped_as<const float>();
}

LanguageModel::LanguageModel(const DeviceOptions& device, const std::filesystem::path& checkpoint,
                             const LanguageModelOptions& options)
    : impl_(std::make_unique<Impl>(device, checkpoint, options)) {
}
LanguageModel::~LanguageModel() = default;

std::vector<float> LanguageModel::next(std::span<const std::uint32_t> text) {
    const std::uint64_t used = std::min<std::uint64_t>(text.size(), impl_->shape.seq);
    if (used == 0)
        throw Error(ErrorCode::InvalidArgument, "there is no text that a token could follow");
    const auto row = impl_->row(impl_->forward(text.last(used)), used - 1);
    return {row.begin(), row.end()};
}

double LanguageModel::loss(std::span<const std::uint32_t> tokens) {
    const std::uint64_t seq = impl_->shape.seq;
    if (tokens.size() != seq + 1)
        throw Error(ErrorCode::InvalidArgument, "a loss needs " + std::to_string(seq + 1) +
                                                    " tokens, not " +
                                                    std::to_string(tokens.size()));
    const auto logits = impl_->forward(tokens.first(seq));
    double sum = 0;
    for (std::uint64_t i = 0; i < seq; ++i) {
        const auto row = impl_->row(logits, i);
        const double greatest = *std::max_element(row.begin(), row.end());
        double total = 0;
        for (const float logit : row)
            total += std::exp(logit - greatest);
        sum += greatest + std::log(total) - row[tokens[i + 1]];
    }
    return sum / static_cast<double>(seq);
}

MemoryReport LanguageModel::memory_report() const {
    return impl_->device->memory_report();
}

} // namespace bellows
