//! A map of few: what nearly always has one entry, and is kept by the thousand.

/// Keys in order, with what belongs to them. Looked up and iterated as quickly as a tree where there are few; to put one in takes
/// time in proportion to how many there are, so only for what is bounded low.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Few<K, V>(Vec<(K, V)>);

impl<K: Ord, V> Few<K, V> {
    pub(super) const fn new() -> Self {
        Self(Vec::new())
    }

    pub(super) const fn len(&self) -> usize {
        self.0.len()
    }

    fn place(&self, key: &K) -> Result<usize, usize> {
        self.0.binary_search_by(|(known, _)| known.cmp(key))
    }

    pub(super) fn contains_key(&self, key: &K) -> bool {
        self.place(key).is_ok()
    }

    pub(super) fn get(&self, key: &K) -> Option<&V> {
        let at = self.place(key).ok()?;
        Some(&self.0[at].1)
    }

    pub(super) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let at = self.place(key).ok()?;
        Some(&mut self.0[at].1)
    }

    /// What belongs to a key; what `value` gives where there is nothing yet.
    pub(super) fn get_or_insert_with(&mut self, key: K, value: impl FnOnce() -> V) -> &mut V {
        let at = self.place(&key).unwrap_or_else(|at| {
            self.0.reserve_exact(1);
            self.0.insert(at, (key, value()));
            at
        });
        &mut self.0[at].1
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.0.iter().map(|(key, value)| (key, value))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (&K, &mut V)> {
        self.0.iter_mut().map(|(key, value)| (&*key, value))
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &V> {
        self.0.iter().map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// It is a map, whatever is put into it in whatever order.
        #[test]
        fn it_is_a_map(keys in prop::collection::vec(0_u8..20, 1..40)) {
            let (mut few, mut map) = (Few::new(), BTreeMap::new());
            for (at, key) in keys.into_iter().enumerate() {
                prop_assert_eq!(few.contains_key(&key), map.contains_key(&key));
                *few.get_or_insert_with(key, || at) += 1;
                *map.entry(key).or_insert(at) += 1;
                if let (Some(one), Some(other)) = (few.get_mut(&key), map.get_mut(&key)) {
                    (*one, *other) = (*one * 2, *other * 2);
                }
                prop_assert_eq!(few.get(&key), map.get(&key));
            }
            prop_assert_eq!(few.len(), map.len());
            prop_assert!(few.iter().eq(map.iter()) && few.values().eq(map.values()));
            prop_assert!(few.iter_mut().eq(map.iter_mut()));
        }
    }
}
