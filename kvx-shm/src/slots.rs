//! Generation-checked tables: a handle that was given up never reaches what is in its slot now.

use kvx_core::id::{PeerId, RegionId, RemoteRegionId};

/// A handle made of a slot and its generation.
pub(crate) trait Handle: Copy {
    fn make(slot: u32, generation: u32) -> Self;
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
pub(crate) struct Slots<H, T> {
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

impl<H: Handle, T> Slots<H, T> {
    /// Puts a value in a free slot. `None` when there are as many as can be named.
    pub(crate) fn insert(&mut self, value: T) -> Option<H> {
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
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len() - self.retired
    }

    pub(crate) fn get(&self, handle: H) -> Option<&T> {
        let (slot, generation) = handle.parts();
        let entry = self.slots.get(slot as usize)?;
        entry.value.as_ref().filter(|_| entry.generation == generation)
    }

    pub(crate) fn get_mut(&mut self, handle: H) -> Option<&mut T> {
        let (slot, generation) = handle.parts();
        let entry = self.slots.get_mut(slot as usize)?;
        entry.value.as_mut().filter(|_| entry.generation == generation)
    }

    /// Takes a value out and makes its handle stale. A slot whose generations are used up is not used again.
    pub(crate) fn remove(&mut self, handle: H) -> Option<T> {
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
    pub(crate) fn drain(&mut self) -> Vec<T> {
        let handles: Vec<H> = self.handles().collect();
        handles.into_iter().filter_map(|handle| self.remove(handle)).collect()
    }

    /// The handles of all values, by slot.
    pub(crate) fn handles(&self) -> impl Iterator<Item = H> + '_ {
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
