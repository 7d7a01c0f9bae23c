// See wire.h. `visit` lists the fields of each type once; Writer and Reader go over the same list.
#include "negotiate/wire.h"

#include <cstring>
#include <type_traits>

namespace gossamer::negotiate {
namespace {

constexpr size_t kUsual = 256;  // bytes of a message, more than most have

template <class Archive, class T>
void visit(Archive& archive, T& value) {
  using Type = std::remove_const_t<T>;
  if constexpr (std::is_same_v<Type, Request>) {
    archive(value.kind, value.op, value.element_bytes, value.device_index, value.root, value.group_size,
            value.era, value.prescale, value.postscale, value.name, value.dtype, value.device, value.group,
            value.call_site, value.refusal, value.shape, value.numbers);
  } else if constexpr (std::is_same_v<Type, Response>) {
    archive(value.request, value.sizes, value.device_indices, value.value, value.bytes, value.slot,
            value.error);
  } else if constexpr (std::is_same_v<Type, Submission>) {
    archive(value.seen, value.bits, value.requests);
  } else if constexpr (std::is_same_v<Type, Run>) {
    archive(value.first_slot, value.slots, value.responses);
  } else if constexpr (std::is_same_v<Type, Decision>) {
    archive(value.sequence, value.batches);
  } else if constexpr (!std::is_same_v<Type, Leave>) {
    archive(value.reason);
  }
}

template <class T>
constexpr bool is_list = false;
template <class T>
constexpr bool is_list<std::vector<T>> = true;
template <>
constexpr bool is_list<std::string> = true;

template <class T>
constexpr bool is_plain = std::is_arithmetic_v<T> || std::is_enum_v<T>;

class Writer {
 public:
  explicit Writer(Bytes& out) : out_(out) {}
  template <class... T>
  void operator()(const T&... values) {
    (put(values), ...);
  }

 private:
  template <class T>
  void put(const T& value) {
    if constexpr (is_plain<T>) {
      raw(&value, sizeof(T));
    } else if constexpr (is_list<T>) {
      put(static_cast<uint32_t>(value.size()));
      if constexpr (is_plain<typename T::value_type>) {
        raw(value.data(), value.size() * sizeof(typename T::value_type));
      } else {
        for (const auto& entry : value) put(entry);
      }
    } else {
      visit(*this, value);
    }
  }
  void raw(const void* data, size_t bytes) {
    const auto* from = static_cast<const uint8_t*>(data);
    out_.insert(out_.end(), from, from + bytes);
  }
  Bytes& out_;
};

class Reader {
 public:
  Reader(const uint8_t* data, size_t bytes) : data_(data), left_(bytes) {}
  template <class... T>
  void operator()(T&... values) {
    (get(values), ...);
  }
  size_t left() const { return left_; }

 private:
  template <class T>
  void get(T& value) {
    if constexpr (is_plain<T>) {
      raw(&value, sizeof(T));
    } else if constexpr (is_list<T>) {
      uint32_t count = 0;
      get(count);
      require(count);  // an entry takes a byte at least
      if constexpr (is_plain<typename T::value_type>) {
        require(count * sizeof(typename T::value_type));
        value.resize(count);
        raw(value.data(), count * sizeof(typename T::value_type));
      } else {
        value.resize(count);
        for (auto& entry : value) get(entry);
      }
    } else {
      visit(*this, value);
    }
  }
  void require(size_t bytes) const {
    GOSSAMER_CHECK(bytes <= left_, ErrorKind::comm, "negotiate: a message of another rank ends too early, ",
                   bytes, " bytes should follow and ", left_, " do; do all ranks run the same version?");
  }
  void raw(void* data, size_t bytes) {
    require(bytes);
    if (bytes > 0) std::memcpy(data, data_, bytes);
    data_ += bytes;
    left_ -= bytes;
  }
  const uint8_t* data_;
  size_t left_;
};

template <size_t index = 0>
Message read(size_t type, Reader& reader) {
  if constexpr (index < std::variant_size_v<Message>) {
    if (type != index) return read<index + 1>(type, reader);
    std::variant_alternative_t<index, Message> message;
    reader(message);
    return message;
  } else {
    raise(ErrorKind::comm, "negotiate: another rank sent a message of the unknown type ", type,
          "; do all ranks run the same version?");
  }
}

}  // namespace

Bytes encode(const Message& message) {
  Bytes bytes;
  bytes.reserve(kUsual);
  bytes.push_back(static_cast<uint8_t>(message.index()));
  Writer writer(bytes);
  std::visit([&](const auto& content) { writer(content); }, message);
  return bytes;
}

Message decode(const Bytes& bytes) {
  GOSSAMER_CHECK(!bytes.empty(), ErrorKind::comm, "negotiate: another rank sent an empty message");
  Reader reader(bytes.data() + 1, bytes.size() - 1);
  Message message = read(bytes[0], reader);
  GOSSAMER_CHECK(reader.left() == 0, ErrorKind::comm, "negotiate: a message of another rank has ",
                 reader.left(), " bytes too many; do all ranks run the same version?");
  return message;
}

}  // namespace gossamer::negotiate
