// SPDX-License-Identifier: MIT
#include "trainer_impl.hpp"

#include <bellows/base/error.hpp>
#include <bellows/engine/gemm_plan.hpp>
#include <bellows/shape/batch_ramp.hpp>
#include <bellows/shape/groups.hpp>
#include <bellows/shape/stages.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

namespace bellows {

namespace {

/// Steps in a row that may be left out because their gradient was not finite.
constexpr std::uint64_t kMostLeftOut = 10;

} // namespace

// ---- A step ---------------------------------------------------------------------------------

void Trainer::Impl::gather(Parted what) {
    device.wait_idle(limit); // weights that still travel are the last step's
    totals.leave_out([&] { optimizer->gather(what); });
}

void Trainer::Impl::check_documents() const {
    if (config.train.document_mask && !running.end_of_document)
        throw Error(ErrorCode::InvalidArgument,
                    "document_mask is set, but nothing says which token ends a document "
                    "(Trainer::end_documents_with())");
}

double Trainer::Impl::held_out_loss(const SequenceSource& source, std::uint64_t count) {
    check_documents();
    if (!evaluation)
        evaluation = std::make_unique<Evaluation>(
            running, everyone,
            Evaluation::Desc{.training = schedule,
                             .place = place,
                             .d = d,
                             .dp = layout.dp,
                             .sequences = sequences_per_micro_batch(config, layout),
                             .world_ranks = world_ranks(),
                             .chunks = pipeline_chunks(),
                             .pipes = {activations.get(), gradients.get()}});
    double loss = 0;
    totals.leave_out([&] { loss = evaluation->loss(source, count); });
    counts->collect(limit); // what chose experts there is no step's load
    return loss;
}

// ---- The trainer ----------------------------------------------------------------------------

/// Half of what it calls is of no use: what is left of that must not go on.
template <class Call>
auto Trainer::Impl::whole(Call call) {
    try {
        return call();
    } catch (const Error& error) {
        device.abort(error);
        throw;
    } catch (const std::exception& error) {
        device.abort(Error(ErrorCode::Internal, error.what()));
        throw;
    }
}

Trainer::Trainer(Device& device, World& world, const RunConfig& config, const RunLayout& layout,
                 const KernelChoice& kernels, const FirstWeights& first_weights)
    : impl_(std::make_unique<Impl>(device, world, config, layout, kernels, first_weights)) {
}
Trainer::~Trainer() {
    try { // jobs and recordings use what goes now
        impl_->device.wait_idle(impl_->limit);
    } catch (const Error&) {
        // Whoever waits for the work learns of it; here it only has to be over.
    }
}

Stage& Trainer::stage(std::uint32_t phase) {
    return *impl_->stages.at(phase);
}
ParameterStore& Trainer::parameters() noexcept {
    return impl_->parameters;
}
const std::string& Trainer::why_decoded() const noexcept {
    return impl_->why_decoded;
}
std::string Trainer::device_link() const {
    return std::string(impl_->exchange_transport->device_link_name());
}

std::map<std::string, std::string> Trainer::chosen_kernels() const {
    if (impl_->config.train.precision == Precision::F32)
        return {};
    return {{"gemm", gemm_class(impl_->device).name},
            {products_key(impl_->config.train.precision),
             describe(impl_->device, impl_->parameters.products())}};
}
const RunConfig& Trainer::config() const noexcept {
    return impl_->config;
}
const RunLayout& Trainer::layout() const noexcept {
    return impl_->layout;
}
const Schedule& Trainer::schedule() const noexcept {
    return impl_->program->schedule;
}
bool Trainer::measures_nodes() const noexcept {
    return impl_->exchanges() ||
           (impl_->config.train.pairs.kind == PairMode::Kind::Auto && impl_->schedule.has_pairs());
}
void Trainer::order_nodes(std::span<const TraceEvent> events) {
    impl_->measured = impl_->mean_node_seconds(events);
    impl_->order_nodes();
}
const std::string& Trainer::pair_pattern() const noexcept {
    return impl_->pair_pattern;
}
Optimizer& Trainer::optimizer() noexcept {
    return impl_->optimizer->shard();
}

bool Trainer::stands_for(const Parameter& parameter) const noexcept {
    return impl_->stands_for(parameter);
}
const std::vector<std::uint64_t>& Trainer::writers() const noexcept {
    return impl_->writers;
}

StepResult Trainer::step(std::uint64_t step, const SequenceSource& source) {
    return impl_->whole([&] { return impl_->run_step(step, source); });
}
double Trainer::held_out_loss(const SequenceSource& source, std::uint64_t count) {
    if (count == 0)
        throw Error(ErrorCode::InvalidArgument, "there are no sequences to look at");
    return impl_->whole([&] { return impl_->held_out_loss(source, count); });
}
void Trainer::end_documents_with(std::uint32_t token) {
    if (impl_->config.train.document_mask)
        impl_->running.end_of_document = token;
}
void Trainer::ask_by(std::function<StepAsks()> asks) {
    impl_->asks = std::move(asks);
}
ExpertPlaces Trainer::expert_places() const {
    return impl_->balancer.places();
}
void Trainer::resume_experts(const ExpertPlaces& places) {
    impl_->whole([&] {
        impl_->balancer.resume(places);
        if (!impl_->slots)
            return;
        impl_->slots->place(impl_->balancer.placements());
        impl_->slots->spread_weights();
    });
}
void Trainer::gather(Parted what) {
    impl_->whole([&] { impl_->gather(what); });
}

StepResult Trainer::Impl::run_step(std::uint64_t step, const SequenceSource& sequences) {
    check_documents();
    use_batch(batch_ramp(config.train).batch(step));
    clearing->begin();
    if (slots)
        slots->clear_gradients();
    counts->begin_step();
    running.index = step;
    running.mtp_weight = mtp_weight(config.train, step + 1);
    running.source = &sequences;
    const std::vector<double> predicted = predicted_by_modules(step, sequences);
    running.predicted = predicted;
    for (double& count : running.predicted)
        count *= static_cast<double>(config.train.batch) / static_cast<double>(program->batch);
    program->executor->run();
    optimizer->finish_gradients();
    std::vector<std::int64_t> loads = counts->collect(limit);
    if (!loads.empty()) // where the device has a queue beside its passes, backward ones go on
        totals.in_collective([&] { copy_peers.all_reduce_sum(std::span(loads)); });
    // The update waits for what all ranks agree on of its gradient; what else they sum up does not
    // hold it up.
    const StepTotals::Sums squares = totals.sum_with_bytes(optimizer->shard().local_squares());
    StepResult result;
    // What is recorded divides by the tokens of the whole batch: 1 unless the step has fewer.
    const double of_batch =
        static_cast<double>(config.train.batch) / static_cast<double>(program->batch);
    result.grad_norm = of_batch * std::sqrt(squares.value);
    result.bytes_exchanged = squares.bytes;
    const double most = config.train.clip_norm;
    const double clip = most > 0 && result.grad_norm > most ? most / result.grad_norm : 1.0;
    result.updated = std::isfinite(result.grad_norm); // the same on all ranks
    if (result.updated) {
        counts->update_biases(loads, step); // ahead of AdamW, which takes the device's memory
        optimizer->update(step + 1, learning_rate(config.train, step + 1), clip * of_batch);
    }
    running.last_loss.wait(limit);
    StepTotals::Losses losses =
        totals.sum_losses(asks ? asks() : StepAsks{}, stands_for_copies(false) // one rank tells
                                                          ? counts->by_layer(loads)
                                                          : std::vector<LayerLoads>{});
    result.asked = losses.asked;
    result.expert_loads = std::move(losses.expert_loads);
    place_experts(step, result);
    result.loss = losses.sum / static_cast<double>(program->batch * config.train.seq);
    for (std::size_t k = 0; k < losses.of_modules.size(); ++k)
        result.mtp_losses.push_back(predicted[k] > 0 ? losses.of_modules[k] / predicted[k] : 0);
    result.sequences = program->batch;
    if (config.train.document_mask)
        result.visible_keys =
            losses.visible_keys / static_cast<double>(program->batch * config.train.seq);
    result.seconds_waited = losses.seconds_waited;
    count_left_out(step, result);
    return result;
}

/// Tokens that each MTP module predicts in the step's batch. Only where documents end is that more
/// than a multiplication: then every rank looks at all sequences.
std::vector<double> Trainer::Impl::predicted_by_modules(std::uint64_t step,
                                                        const SequenceSource& sequences) const {
    const std::uint64_t seq = config.train.seq;
    std::vector<double> predicted(config.model.mtp_depth);
    if (!running.end_of_document) {
        for (std::size_t k = 0; k < predicted.size(); ++k)
            predicted[k] = static_cast<double>(program->batch * (seq - k - 1));
        return predicted;
    }
    std::vector<std::uint32_t> line(seq + 1);
    for (std::uint64_t i = 0; !predicted.empty() && i < program->batch; ++i) {
        sequences(step, i, line);
        for (std::size_t k = 0; k < predicted.size(); ++k)
            predicted[k] +=
                static_cast<double>(predicted_by_module(line, k, running.end_of_document));
    }
    return predicted;
}

/// Says what each rank computed, and places experts anew when it is time.
void Trainer::Impl::place_experts(std::uint64_t step, StepResult& result) {
    for (LayerLoads& layer : result.expert_loads)
        if (layout.ep > 1)
            layer.rank_loads = balancer.rank_loads(layer);
    result.moved_experts = balancer.moved();
    const auto changed = balancer.after_step(step + 1, result.expert_loads);
    if (!changed.empty())
        slots->place(changed);
}

void Trainer::Impl::count_left_out(std::uint64_t step, const StepResult& result) {
    const bool finite = result.updated && std::isfinite(result.loss);
    steps_left_out = finite ? 0 : steps_left_out + 1;
    if (steps_left_out < kMostLeftOut)
        return;
    char loss[32];
    std::snprintf(loss, sizeof loss, "%g", result.loss);
    throw Error(ErrorCode::Diverged,
                "the gradient or the loss of step " + std::to_string(step + 1) + " and of the " +
                    std::to_string(kMostLeftOut - 1) + " steps before is not finite (loss " + loss +
                    "); go on from an earlier checkpoint with a lower lr or a smaller clip_norm");
}

} // namespace bellows
