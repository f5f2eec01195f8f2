// SPDX-License-Identifier: MIT

// What a rank is in the middle of, so that an error that comes from outside can say it.

#include "control_plane_impl.hpp"
#include "fail_together.hpp"

#include <utility>

namespace bellows {

Error meanwhile(const Error& error, int rank, const std::string& doing) {
    const std::string mark = "; meanwhile rank " + std::to_string(rank) + " was in ";
    if (doing.empty() || error.message().find(mark) != std::string::npos)
        return error;
    return Error(error.code(), error.message() + mark + doing, error.rank(), error.detail());
}

std::function<void(const Error&)> tell_all(ControlPlane& control) {
    if (control.size() == 1)
        return nullptr;
    return [&control](const Error& error) { control.abort(error); };
}

ControlPlane::Subscription abort_on_failure(ControlPlane& control, Device& device) {
    return control.on_failure(
        [&control, &device](const Error& error) { device.abort(control.with_activities(error)); });
}

ControlPlane::Activity::Activity(Activity&& other) noexcept
    : owner_(std::exchange(other.owner_, nullptr)), id_(other.id_) {
}

ControlPlane::Activity& ControlPlane::Activity::operator=(Activity&& other) noexcept {
    if (this != &other) {
        end();
        owner_ = std::exchange(other.owner_, nullptr);
        id_ = other.id_;
    }
    return *this;
}

ControlPlane::Activity::~Activity() {
    end();
}

void ControlPlane::Activity::end() noexcept {
    if (ControlPlane* owner = std::exchange(owner_, nullptr)) {
        const std::lock_guard lock(owner->impl_->activity_mutex);
        owner->impl_->activities.erase(id_);
    }
}

ControlPlane::Activity ControlPlane::begin_activity(std::function<std::string()> describe) {
    Activity activity;
    const std::lock_guard lock(impl_->activity_mutex);
    activity.id_ = impl_->next_activity++;
    impl_->activities.emplace(activity.id_, std::move(describe));
    activity.owner_ = this;
    return activity;
}

void ControlPlane::enter_phase(std::string phase) {
    const std::lock_guard lock(impl_->mutex);
    impl_->phase = std::move(phase);
}

std::string ControlPlane::Impl::seen_when() const {
    return phase.empty() ? "" : " (rank " + std::to_string(rank) + " saw it " + phase + ")";
}

Error ControlPlane::with_activities(const Error& error) const {
    constexpr std::size_t kMost = 8;
    std::string text;
    std::size_t count = 0;
    {
        const std::lock_guard lock(impl_->activity_mutex);
        for (const auto& [id, describe] : impl_->activities)
            if (++count <= kMost)
                text += (text.empty() ? "" : "; in ") + describe();
    }
    if (count > kMost)
        text += "; and in " + std::to_string(count - kMost) + " more";
    return meanwhile(error, rank(), text);
}

} // namespace bellows
