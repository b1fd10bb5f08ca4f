//! Tables for backends: a handle that was given up never reaches what is in its slot now.
//!
//! That is point 8 of the [contract](crate::backend). A vendor's backend may keep its peers, regions and keys in these, or
//! in whatever else holds it.

use std::fmt;

use crate::id::{PeerId, RegionId, RemoteRegionId};

/// A handle made of a slot and its generation.
pub trait Handle: Copy {
    /// The handle of a slot in a generation.
    fn make(slot: u32, generation: u32) -> Self;
    /// Its slot and generation.
    fn parts(self) -> (u32, u32);
}

macro_rules! handle {
    ($($name:ident),*) => {$(
        impl Handle for $name {
            fn make(slot: u32, generation: u32) -> Self {
                Self::new(slot, generation)
            }

            fn parts(self) -> (u32, u32) {
                (self.slot(), self.generation())
            }
        }
    )*};
}

handle!(PeerId, RegionId, RemoteRegionId);

/// Values by handle.
///
/// ```
/// use kvx_core::{id::PeerId, slots::Slots};
///
/// let mut peers: Slots<PeerId, &str> = Slots::default();
/// let first = peers.insert("first").unwrap();
/// assert_eq!(peers.remove(first), Some("first"));
/// let second = peers.insert("second").unwrap();
/// // The same slot, and yet the old handle reaches nothing.
/// assert_eq!((second.slot(), peers.get(first)), (first.slot(), None));
/// ```
pub struct Slots<H, T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    /// Slots that are not used again.
    retired: usize,
    handle: std::marker::PhantomData<H>,
}

struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

impl<H, T> Default for Slots<H, T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new(), retired: 0, handle: std::marker::PhantomData }
    }
}

impl<H, T> fmt::Debug for Slots<H, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slots").field("slots", &self.slots.len()).finish_non_exhaustive()
    }
}

impl<H: Handle, T> Slots<H, T> {
    /// Puts a value in a free slot. `None` when there are as many as can be named.
    pub fn insert(&mut self, value: T) -> Option<H> {
        if let Some(slot) = self.free.pop() {
            let entry = self.slots.get_mut(slot as usize)?;
            entry.value = Some(value);
            return Some(H::make(slot, entry.generation));
        }
        let slot = u32::try_from(self.slots.len()).ok()?;
        self.slots.push(Slot { generation: 0, value: Some(value) });
        Some(H::make(slot, 0))
    }

    /// How many there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.slots.len() - self.free.len() - self.retired
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The value of a handle, unless that is stale or unknown.
    pub fn get(&self, handle: H) -> Option<&T> {
        let (slot, generation) = handle.parts();
        let entry = self.slots.get(slot as usize)?;
        entry.value.as_ref().filter(|_| entry.generation == generation)
    }

    /// As [`get`](Self::get).
    pub fn get_mut(&mut self, handle: H) -> Option<&mut T> {
        let (slot, generation) = handle.parts();
        let entry = self.slots.get_mut(slot as usize)?;
        entry.value.as_mut().filter(|_| entry.generation == generation)
    }

    /// Takes a value out and makes its handle stale. A slot whose generations are used up is not used again.
    pub fn remove(&mut self, handle: H) -> Option<T> {
        let (slot, generation) = handle.parts();
        let entry = self.slots.get_mut(slot as usize).filter(|e| e.generation == generation)?;
        let value = entry.value.take()?;
        if let Some(next) = generation.checked_add(1) {
            entry.generation = next;
            self.free.push(slot);
        } else {
            self.retired += 1;
        }
        Some(value)
    }

    /// Takes everything out.
    pub fn drain(&mut self) -> Vec<T> {
        let handles: Vec<H> = self.handles().collect();
        handles.into_iter().filter_map(|handle| self.remove(handle)).collect()
    }

    /// The handles of all values, by slot.
    pub fn handles(&self) -> impl Iterator<Item = H> + '_ {
        (0u32..)
            .zip(&self.slots)
            .filter(|(_, entry)| entry.value.is_some())
            .map(|(slot, entry)| H::make(slot, entry.generation))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_handle_reaches_nothing() {
        let mut slots: Slots<RegionId, &str> = Slots::default();
        let first = slots.insert("first").unwrap();
        let other = slots.insert("other").unwrap();
        assert_eq!(slots.remove(first), Some("first"));
        let second = slots.insert("second").unwrap();
        assert_eq!(second.slot(), first.slot());
        assert_ne!(second, first);
        assert_eq!(slots.get(first), None);
        assert_eq!(slots.get_mut(first), None);
        assert_eq!(slots.remove(first), None);
        assert_eq!(slots.get(second), Some(&"second"));
        assert_eq!(slots.get(RegionId::new(9, 0)), None);
        assert_eq!(slots.handles().collect::<Vec<_>>(), [second, other]);
        assert_eq!(slots.len(), 2);
        assert_eq!(slots.drain(), ["second", "other"]);
        assert_eq!(slots.len(), 0);
        assert_eq!(slots.get(other), None);
    }

    #[test]
    fn a_slot_whose_generations_are_used_up_is_retired() {
        let mut slots: Slots<RegionId, u8> = Slots::default();
        slots.insert(1).unwrap();
        slots.slots[0].generation = u32::MAX;
        assert_eq!(slots.remove(RegionId::new(0, u32::MAX)), Some(1));
        assert_eq!(slots.insert(2).unwrap().slot(), 1);
    }
}
