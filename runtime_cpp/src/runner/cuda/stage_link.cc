#include "runner/cuda/stage_link.h"

#include "aotllm/errors.h"

namespace aotllm::cuda {
namespace {

/// An event is made on the current device.
OwnedEvent event_on(int device) {
  check(cudaSetDevice(device), "choice of the device");
  return OwnedEvent();
}

/// Without it, a copy goes through the host.
void enable_peer_access(int from, int to) {
  int possible = 0;
  if (from == to) return;
  check(cudaDeviceCanAccessPeer(&possible, from, to), "access to a peer's memory");
  if (possible == 0) return;
  check(cudaSetDevice(from), "choice of the device");
  const cudaError_t status = cudaDeviceEnablePeerAccess(to, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();  // is no failure, but would be found as one later
  } else {
    check(status, "access to a peer's memory");
  }
}

}  // namespace

StageLink::StageLink(int sender_device, int receiver_device, void* to, bool holds_thread)
    : sender_device_(sender_device),
      receiver_device_(receiver_device),
      to_(to),
      holds_thread_(holds_thread),
      sent_event_(event_on(sender_device)),
      released_event_(event_on(receiver_device)) {
  enable_peer_access(sender_device, receiver_device);
}

void StageLink::send(const void* from, std::size_t bytes, cudaStream_t stream) {
  wait_for(released_, sent_);
  if (sent_ > 0) check(cudaStreamWaitEvent(stream, released_event_.handle(), 0), "wait for the next stage");
  check(cudaMemcpyPeerAsync(to_, receiver_device_, from, sender_device_, bytes, stream), "copy to the next stage");
  check(cudaEventRecord(sent_event_.handle(), stream), "event of a stage");
  advance(sent_);
}

void StageLink::receive(cudaStream_t stream) {
  wait_for(sent_, released_ + 1);
  if (holds_thread_) check(cudaEventSynchronize(sent_event_.handle()), "the stage before");
  check(cudaStreamWaitEvent(stream, sent_event_.handle(), 0), "wait for the stage before");
}

void StageLink::release(cudaStream_t stream) {
  check(cudaEventRecord(released_event_.handle(), stream), "event of a stage");
  advance(released_);
}

void StageLink::abort() noexcept {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  changed_.notify_all();
}

void StageLink::wait_for(const std::int64_t& count, std::int64_t steps) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return count == steps || aborted_; });
  if (aborted_) throw Error(ErrorKind::kInternal, "another stage has failed");
}

void StageLink::advance(std::int64_t& count) {
  const std::lock_guard lock(mutex_);
  ++count;
  changed_.notify_all();
}

}  // namespace aotllm::cuda
